//! The optimizer partition: AdamW on one shard of the flat space.
