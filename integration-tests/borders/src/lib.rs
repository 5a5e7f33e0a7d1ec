//! Coxswain's own sources, read for the tests that hold its borders (`tests/borders.rs`, `tests/words.rs`).
//!
//! ```text
//! workspace   which crates there are, which depend on which, their files      cargo metadata
//! sources     the production modules of one crate, parsed                     syn
//! imports     which file uses what another one defines; circles
//! sizes       fields of structs, methods of types, parameters of functions
//! lines       lines of production code
//! words       words that a file must not contain
//! text        what of a source is code, comment and literal; words of a name
//! ```
//!
//! What is compiled for tests alone is not production: it is left out, inline modules included. Calls of
//! methods are not followed, since that would take types: a type whose methods are spread over files that
//! call each other shows in the number of its methods.

#![forbid(unsafe_code)]

pub mod imports;
pub mod lines;
pub mod sizes;
pub mod sources;
pub mod text;
pub mod words;
pub mod workspace;
