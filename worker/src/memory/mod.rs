//! Peak memory, measured.
