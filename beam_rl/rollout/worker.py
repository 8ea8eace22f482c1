"""vLLM's CPU worker with a route recorder, which vLLM itself has only on a GPU.

Replies are bytes and lists: nothing is pickled between the processes.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from beam_rl.model_config import experts_of, is_beam, layer_kinds
from beam_rl.rollout import compat
from beam_rl.rollout.routes import RouteRecorder

RECORD_ROUTES = "beam_rl_record_routes"  # key of vLLM's additional_config


class CpuWorker(CPUWorker):
    """vLLM's CPU worker with a route recorder."""

    recorder: RouteRecorder | None = None
    preemptions = 0
    route_layers: list[int]
    slot_view: compat.SlotView

    def load_model(self, **options: Any) -> None:
        if not is_beam(self.vllm_config.model_config.hf_config.to_dict()):
            from beam_rl.rollout.experts import PlainExperts

            compat.keep_all_plain(PlainExperts)
        super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        compat.make_stage_buffer(self.model_runner)
        extra: Any = self.vllm_config.additional_config
        if extra.get(RECORD_ROUTES):
            config = self.vllm_config.model_config.hf_config.to_dict()
            kinds = layer_kinds(config)
            layers = sum(kinds[i] == "sparse" for i in compat.own_layers(self.model_runner))
            tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            self.recorder = RouteRecorder(layers, config["num_experts_per_tok"], experts_of(config), tokens)
            self.route_layers = compat.capture_routes(self.model_runner.get_model(), self.recorder.hook)
            if len(self.route_layers) != layers:
                raise RuntimeError(
                    f"rollout.routing_replay: vLLM tells the routes of {len(self.route_layers)} layers of this model, and "
                    f"{layers} have experts; train it with rollout.routing_replay=false"
                )
            self.slot_view = compat.SlotView(self.model_runner)
            self.recorder.attach(self.slot_view)
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        preempted = scheduler_output.preempted_req_ids or ()
        self.preemptions += len(preempted)
        if self.recorder is None:
            return super().execute_model(scheduler_output)
        self.slot_view.preempt(preempted)
        self.recorder.before_step(compat.finished_requests(scheduler_output))
        output = super().execute_model(scheduler_output)
        if tokens := scheduler_output.total_num_scheduled_tokens:
            self.recorder.after_step(tokens)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        with compat.unseeded_while_prefilling(self.model_runner):
            return super().sample_tokens(grammar_output)

    def take_routes(self, request_ids: list[str]) -> list[Any]:
        """[layers, bytes, rows of each request]: the finished requests' routes end to end, then forgotten.

        Of this worker's MoE layers, by their global numbers. Tensor-parallel neighbours route alike: the first one tells.
        """
        assert self.recorder is not None
        routes = [self.recorder.take(request_id) for request_id in request_ids]
        if compat.tensor_rank() > 0:
            return [[], b"", []]
        return [self.route_layers, b"".join(r.tobytes() for r in routes), [len(r) for r in routes]]

    def drop_routes(self, request_ids: list[str]) -> None:
        """Forgets aborted requests."""
        assert self.recorder is not None
        for request_id in request_ids:
            self.recorder.drop(request_id)

    def route_counters(self) -> list[int]:
        """[responses whose routes are kept or to be ignored: 0 when idle, preemptions since the start]."""
        held = 0 if self.recorder is None else len(self.recorder.finished) + len(self.recorder.unwanted)
        return [held, self.preemptions]
