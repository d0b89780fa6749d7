"""The pages in docs/knobs: hand-written prose around blocks whose numbers come from result files and the simulator."""
