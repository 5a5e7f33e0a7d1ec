//! The whole policy: vision-language model, sensor encoder, action expert.
