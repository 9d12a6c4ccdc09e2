"""The demo behind `branchfx demo`: one GRPO step on sampled rollouts, with eager and with branchreplay."""
