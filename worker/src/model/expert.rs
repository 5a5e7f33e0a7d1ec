//! The action expert: DiT blocks that cross-attend the vision-language hidden states.
