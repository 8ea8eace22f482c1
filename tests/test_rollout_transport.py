"""Buckets over each CPU transport: a sender here, receivers in threads or in processes that get killed."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_peers import CPU, HOST, Open, Peer, PeerProcess, Peers, RemoteSender, weights
from torch import Tensor

from beam_rl.bench.remote import Remote
from beam_rl.errors import InputError
from beam_rl.rollout.sync import transport
from beam_rl.rollout.sync.nccl import interface_of
from beam_rl.rollout.sync.place import Place, choose
from beam_rl.rollout.sync.shm import ShmReceiver, ShmSender
from beam_rl.rollout.sync.transport import BROKE_OFF, SyncError

pytest_plugins = ["sync_peers"]

both = pytest.mark.parametrize("transport", ["shm", "gloo"])


def assert_has(got: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert got.keys() == sent.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in sent.items())


@both
def test_every_receiver_gets_every_tensor_bit_for_bit_twice(transport: str, open_for: Open) -> None:
    sender = open_for(transport, engines=2)
    peers = Peers(sender)
    for seed in (3, 4):
        for peer in peers.peers:
            peer.begin()
        stats = sender.send(weights(seed).items(), peers.announce)
        assert stats.buckets == 10 and stats.bytes == sum(t.nbytes for t in weights().values())
        for peer in peers.peers:
            assert_has(peer.got, weights(seed))


@both
def test_every_worker_of_an_engine_gets_every_tensor_and_the_engine_answers_for_all(
    transport: str, open_for: Open
) -> None:
    sender = open_for(transport, engines=2, workers=2)
    with ThreadPoolExecutor(4) as threads:
        places = [(engine, worker) for engine in range(2) for worker in range(2)]
        joining = [threads.submit(Peer, sender.join_infos()[engine], CPU, worker) for engine, worker in places]
        sender.connect()
        peers = [call.result(10) for call in joining]

        def update(engine: int, bucket: dict[str, Any]) -> None:
            for peer in peers[2 * engine :][:2]:
                peer.receive(bucket)

        queues = [ThreadPoolExecutor(1) for _ in range(2)]  # an engine takes its calls one after the other
        sender.send(weights().items(), lambda bucket: [q.submit(update, i, bucket) for i, q in enumerate(queues)])
    for peer in peers:
        assert_has(peer.got, weights())


@both
def test_next_bucket_is_packed_while_one_is_held_and_the_one_after_waits_for_its_buffer(
    transport: str, open_for: Open
) -> None:
    sender = open_for(transport, engines=1)
    peers, asked, let_go = Peers(sender), [], threading.Event()

    def produce() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights().items():
            asked.append(name)
            yield name, tensor

    def held(bucket: dict[str, Any]) -> None:
        if bucket["number"] == 0:
            assert let_go.wait(20)
        peers.peers[0].receive(bucket)

    announced = []

    def announce(bucket: dict[str, Any]) -> list[Future]:
        announced.append(bucket["number"])
        return [peers.submit(0, held, bucket)]

    sending = threading.Thread(target=sender.send, args=(produce(), announce))
    sending.start()
    names_of_two_buckets = 6  # 800 and 400 bytes in turn, 2000 a bucket, and the one that begins the third
    end = time.monotonic() + 10
    while len(announced) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert announced == [0, 1] and len(asked) == names_of_two_buckets + 1
    let_go.set()
    sending.join(20)
    assert_has(peers.peers[0].got, weights())


class Damaging:
    """A receiver's end in whose every third bucket one bit turns over."""

    def __init__(self, end: Any) -> None:
        self.end, self.count = end, 0
        self.own_buffers, self.start = end.own_buffers, end.start

    def wait(self, slot: int, deadline_s: float) -> Tensor:
        data = self.end.wait(slot, deadline_s).clone()
        self.count += 1
        if self.count % 3 == 0:
            data[len(data) // 2] ^= 4
        return data


@both
def test_damaged_byte_fails_the_sync_with_bucket_and_engine(transport: str, open_for: Open) -> None:
    sender = open_for(transport, engines=2)
    peers = Peers(sender)
    peers.peers[1].receiver.end = Damaging(peers.peers[1].receiver.end)
    noticed = 3 if peers.peers[1].receiver.end.own_buffers else 2  # while the next one is on its way
    said = rf"bucket {noticed} \(w\d+ …\): engine 1 failed: .*bucket 2 arrived damaged"
    with pytest.raises(SyncError, match=said) as failed:
        sender.send(weights().items(), peers.announce)
    assert failed.value.engines == (1,)


def test_without_checksums_nothing_looks_at_the_bytes(open_for: Open) -> None:
    sender = open_for("shm", engines=1, checksums=False)
    peers = Peers(sender)
    peers.peers[0].receiver.end = Damaging(peers.peers[0].receiver.end)
    sender.send(weights().items(), peers.announce)
    assert not all(torch.equal(peers.peers[0].got[name], tensor) for name, tensor in weights().items())


@both
def test_engine_that_hangs_is_named_at_the_deadline_and_the_other_takes_the_next_sync(
    transport: str, open_for: Open
) -> None:
    sender = open_for(transport, engines=2, deadline_s=1)
    peers = Peers(sender)
    hanging: Future = Future()
    start = time.monotonic()
    with pytest.raises(SyncError, match=r"bucket 0 \(w0 …\): engine 1 did not answer within 1 s$") as failed:
        sender.send(weights().items(), lambda bucket: [peers.announce(bucket)[0], hanging])
    assert time.monotonic() - start < 5 and failed.value.engines == (1,)
    sender.close()
    takes_a_whole_sync(peers, transport, open_for)


def test_where_one_that_hangs_keeps_the_others_from_receiving_it_alone_is_named(
    open_for: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NCCL: who waits for the same broadcast answers when it is given up, after the deadline."""
    sender = open_for("gloo", engines=2, deadline_s=0.5)
    waiting, hanging = Future(), Future()
    broken = SyncError(f"the transfer {BROKE_OFF}: the trainer gave it up")
    monkeypatch.setattr(transport, "LET_GO_S", 1.0)
    monkeypatch.setattr(sender.end, "shared_fate", True)
    monkeypatch.setattr(sender.end, "abandon", lambda: threading.Timer(0.2, waiting.set_exception, [broken]).start())
    with pytest.raises(SyncError, match="engine 1 did not answer") as failed:
        sender.send([("w", torch.zeros(3))], lambda bucket: [waiting, hanging])
    assert failed.value.engines == (1,)


def takes_a_whole_sync(peers: Peers, transport: str, open_for: Open) -> None:
    """The first peer, after whatever happened, with a sender of its own."""
    again = open_for(transport, engines=1)
    fresh = Peers(again)
    peers.peers[0].receiver.end = fresh.peers[0].receiver.end
    peers.peers[0].begin()
    again.send(weights(5).items(), lambda bucket: [peers.submit(0, peers.peers[0].receive, bucket)])
    assert_has(peers.peers[0].got, weights(5))


def test_engine_that_fails_ends_the_wait_with_its_own_error(open_for: Open) -> None:
    sender = open_for("gloo", engines=1, deadline_s=30)
    peers = Peers(sender)

    def fail() -> None:
        raise RuntimeError("out of memory on the engine")

    start = time.monotonic()
    with pytest.raises(SyncError, match="bucket 0 .*: engine 0 failed: out of memory on the engine") as failed:
        sender.send(weights().items(), lambda bucket: [peers.submit(0, fail)])
    assert time.monotonic() - start < 5 and failed.value.engines == (0,)


def test_engine_that_never_joins_is_named(open_for: Open) -> None:
    sender = open_for("gloo", engines=3, deadline_s=0.5)
    with pytest.raises(SyncError, match=r"joining the weight sync: engine 0 did not arrive within 0.5 s") as failed:
        sender.connect()
    assert failed.value.engines == (0,)


def test_engine_that_cannot_join_ends_the_wait(open_for: Open) -> None:
    sender = open_for("gloo", engines=2, deadline_s=30)
    failing: Future = Future()
    failing.set_exception(RuntimeError("no such host"))
    with pytest.raises(SyncError, match="joining the weight sync: engine 1 failed: no such host") as failed:
        sender.connect([Future(), failing])
    assert failed.value.engines == (1,)


@both
def test_killed_receiver_is_named_at_once_and_the_survivor_takes_the_next_sync(transport: str, open_for: Open) -> None:
    sender = open_for(transport, engines=2, deadline_s=30)
    processes = [PeerProcess() for _ in range(2)]
    try:
        joins = sender.join_infos()
        sender.connect([p.call("join", join) for p, join in zip(processes, joins, strict=True)])

        def announce(bucket: dict[str, Any]) -> list[Future]:
            calls = [p.call("hold" if (i, bucket["number"]) == (1, 3) else "receive", bucket) for i, p in both_of()]
            if bucket["number"] == 3:
                os.kill(processes[1].process.pid or 0, signal.SIGKILL)
            return calls

        both_of = lambda: enumerate(processes)  # noqa: E731
        start = time.monotonic()
        with pytest.raises(SyncError, match=r"bucket \d .*: engine 1 failed: the process has died$") as failed:
            sender.send(weights().items(), announce)
        assert time.monotonic() - start < 5 and failed.value.engines == (1,)
        sender.close()

        again = open_for(transport, engines=1)
        again.connect([processes[0].call("join", again.join_infos()[0])])
        again.send(weights(6).items(), lambda bucket: [processes[0].call("receive", bucket)])
        got = processes[0].call("got").result(10)
        assert got == {name: tensor.float().tolist() for name, tensor in weights(6).items()}
    finally:
        for p in processes:
            p.stop()


@both
def test_receiver_whose_sender_is_killed_is_free_at_once_for_another(transport: str, open_for: Open) -> None:
    process = Remote(RemoteSender, transport)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(Peer, process.call("join_info").result(30))
        process.call("connect").result(30)
        peer = joining.result(10)
        peer.receiver.end.start(0, 100)
        waiting = thread.submit(peer.receiver.end.wait, 0, 30.0) if transport == "gloo" else None
        time.sleep(0.2)
        start = time.monotonic()
        process.stop()
        if waiting is not None:  # nobody waits for shared memory
            with pytest.raises(SyncError, match="nothing came from the trainer"):
                waiting.result(10)
        assert time.monotonic() - start < 5
    again = Peers(open_for(transport, engines=1))
    peer.receiver.end = again.peers[0].receiver.end
    again.sender.send(weights(5).items(), lambda bucket: [again.submit(0, peer.receive, bucket)])
    assert_has(peer.got, weights(5))


def test_engine_that_waits_for_the_others_to_join_is_let_go_when_one_cannot(open_for: Open) -> None:
    sender = open_for("gloo", engines=2, deadline_s=30)
    first, second = PeerProcess(), Future()
    try:
        joining = first.call("join", sender.join_infos()[0])
        while not sender.end.has_arrived(0, 1):
            assert not joining.done()
        second.set_exception(RuntimeError("no such host"))
        with pytest.raises(SyncError):
            sender.connect([joining, second])
        start = time.monotonic()
        with pytest.raises(Exception, match="Connection|closed|reset"):
            joining.result(20)
        assert time.monotonic() - start < 5
    finally:
        first.stop()


def test_shared_memory_has_no_name_that_could_stay_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    sender = ShmSender(4096, CPU)
    view = ShmReceiver(sender.join_info(), CPU)
    sender.buffers[1][:3] = 7
    assert set(Path("/dev/shm").iterdir()) == before
    view.start(1, 3)
    assert view.wait(1, 1.0).tolist() == [7, 7, 7]
    sender.close()
    assert view.wait(1, 1.0).tolist() == [7, 7, 7]  # a receiver outlives its sender


def test_shared_memory_of_a_sender_that_is_gone_or_another_is_refused() -> None:
    sender = ShmSender(4096, CPU)
    join = sender.join_info()
    with pytest.raises(SyncError, match="shared memory: process 4194305: No such file"):
        ShmReceiver(join | {"pid": 2**22 + 1}, CPU)  # beyond Linux's largest process id
    with pytest.raises(SyncError, match="is another one"):
        ShmReceiver(join | {"segments": [[fd, inode + 1, size] for fd, inode, size in join["segments"]]}, CPU)


def test_sender_listens_on_its_own_address_only(open_for: Open) -> None:
    sender = open_for("gloo", engines=1)
    port = sender.join_infos()[0]["port"]
    socket.create_connection((HOST, port), timeout=1).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=1)


def test_nccl_listens_at_the_interface_that_has_the_address() -> None:
    assert interface_of(HOST) == "lo"
    with pytest.raises(InputError, match="192.0.2.77: no network interface"):
        interface_of("192.0.2.77")


def test_transport_follows_from_the_places() -> None:
    here, there = Place("m", ""), Place("n", "")
    assert choose("auto", here, [here, here]) == "shm"
    assert choose("auto", here, [here, there]) == "gloo"
    assert choose("gloo", here, [here]) == "gloo"
    first, second, third = (Place("m", gpu) for gpu in "abc")
    assert choose("auto", first, [first, first]) == "ipc"
    assert choose("auto", first, [second, third]) == "nccl"
    assert choose("shm", first, [second, third]) == "shm"
    assert choose("auto", first, [first, second]) == "shm"
    with pytest.raises(InputError, match="sync.transport = shm: needs trainer and engines on one machine"):
        choose("shm", here, [there])
    for asked in ("ipc", "nccl"):
        with pytest.raises(InputError, match=f"sync.transport = {asked}: needs .* GPU"):
            choose(asked, here, [here])
