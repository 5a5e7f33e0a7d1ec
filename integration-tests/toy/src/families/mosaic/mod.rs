//! A variant made from the page `docs/develop/add-a-model.md`: what `quilt` is, under names of its own,
//! without the gate in its MLPs, and with files in which names lack `model.`.
//!
//! It stands for a copy of that folder. So that nothing has to be read twice, files that would be copied as
//! they are, are compiled a second time: they know their siblings only by `super`. What differs:
//!
//! ```text
//! rules   what names mean
//! block   no gate
//! ```
#![expect(clippy::duplicate_mod, reason = "these stand for copies")]

mod block;
#[path = "../quilt/config.rs"]
mod config;
#[path = "../quilt/decode.rs"]
mod decode;
#[path = "../quilt/family.rs"]
mod family;
#[path = "../quilt/model.rs"]
mod model;
#[path = "../quilt/modules.rs"]
mod modules;
#[path = "../quilt/outline.rs"]
mod outline;
#[path = "../quilt/pass.rs"]
mod pass;
#[path = "../quilt/processor.rs"]
mod processor;
#[path = "../quilt/rows.rs"]
mod rows;
mod rules;
#[path = "../quilt/run.rs"]
mod run;

pub use self::family::Family;
