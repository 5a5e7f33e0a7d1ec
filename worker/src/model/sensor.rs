//! The sensor encoder: a window of readings becomes tokens.
