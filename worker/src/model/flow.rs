//! Flow matching: noising, targets, loss, sampling, in both sign conventions.
