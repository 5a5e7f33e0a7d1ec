//! Layer recompute: forward keeps block inputs, backward re-runs one block at a time.
