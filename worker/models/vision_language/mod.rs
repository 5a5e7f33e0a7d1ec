//! The seam between tasks and vision-language models: what a family offers, and what a task asks of a model
//! that was loaded. Tasks know these types, and no family; a family knows no task.
//!
//! ```text
//! family     VlFamily, VlFamilyOn: what a family offers, without a device and on one
//! outline    what config.json says: modules, sizes, rules of names
//! model      VisionLanguage, VlRun, VlTrace, Decoder: a model on a device, a micro-batch through it and back
//! tap        where in a model a head reads, and where features are kept
//! kept       features of samples one after another, and in the rows of a micro-batch
//! text       PromptEncoder, ChatEncoder: text to token ids
//! ```
//!
//! # What a head may read
//!
//! A run is asked for a list of taps, and gives a tensor for each; the backward pass takes a gradient for
//! each. The last hidden states are one tap; a head whose layers each attend to a layer of the language model
//! asks for as many. Gradients of all of them go down in one pass.

pub mod family;
pub mod kept;
pub mod model;
pub mod outline;
pub mod tap;
pub mod text;

pub use self::{
    family::{VlFamily, VlFamilyOn},
    model::{
        Decoder, KeptInput, LoadOptions, PassError, Prefill, VisionLanguage, VisionTrunk, VlPass, VlRun,
        VlTrace, streamed_during,
    },
    outline::{ModelOutline, PromptTokens},
    tap::Tap,
    text::{ChatEncoder, EncodedChat, Message, Piece, PromptEncoder, PromptForm, Role},
};
