//! What families share whose models are a vision tower before a language model of decoder layers.
//!
//! ```text
//! pixels ─▶ stem: patches, blocks ─▶ merger ─▶ image tokens ┐
//!            └ after some blocks: a merger ─▶ a stream ─────┼───────▶ added behind the first layers
//! ids ────▶ table ─────────────────────────────────────────┴▶ decoder layers ─▶ final norm ─▶ head
//! ```
//!
//! ```text
//! sizes · modules      what a configuration says; names of the language model's modules
//! reading              fields and names that families read alike
//! rope · grid          host integers and tables: positions on three axes, patches of images
//! vision               what a family's own tower has to offer
//! text · gated_mlp · embed         the language model
//! model                both towers, read from a directory
//! run · pass · images · streams · kept · dropout     a micro-batch through both and back
//! decode · following   prompts, and tokens after them one by one
//! family               what tasks find, of what a family says
//! trunk                the vision tower's first blocks alone: what images are between them
//! forward · inputs     `cox model forward`: everything at once, for comparison with other implementations
//! ```
//!
//! Frozen tensors live on the plain backend. The blocks run on any tape: the trainer decides what is
//! recorded. Not here: which layers are recomputed, and any family.

mod decode;
mod dropout;
pub mod embed;
pub mod family;
mod following;
pub mod forward;
pub mod gated_mlp;
pub mod grid;
mod images;
pub mod inputs;
mod kept;
pub mod model;
pub mod modules;
mod pass;
pub mod reading;
pub mod rope;
mod run;
pub mod sizes;
mod streams;
mod sums;
pub mod text;
pub mod trunk;
pub mod vision;
