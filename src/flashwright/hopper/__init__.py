"""The Hopper family (sm_90a): bulk tensor copies, warpgroup products, warp specialisation."""
