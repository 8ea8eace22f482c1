"""What a run shows: the terminal, metrics.jsonl and W&B. Plain numbers in; knows no Megatron, vLLM or Ray."""
