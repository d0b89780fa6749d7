"""The operation *forward*: O = softmax(Q·Kᵀ·scale)·V and the log-sum-exp of the scores; one folder per family."""
