"""`python -m beam_rl` is `beam-rl`."""

from beam_rl.cli import main

main()
