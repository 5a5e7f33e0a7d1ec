//! The third seam: models beside whose layers other streams attend.
//!
//! A policy such as SmolVLA or pi0 does not read what a language model gives: its expert has as many
//! layers, and attends in each of them to the keys and values of the language model's layer, by its own
//! rules of masks and positions. So the model is not run as a whole. It lends its parts, and the policy's
//! folder runs them:
//!
//! ```text
//! outline  JointOutline: sizes, names and tokens, from the directory alone
//! family   JointFamily, JointFamilyOn: what a backbone's directory says, and a model whose weights lie in a
//!          policy's file
//! model    JointModel: images to features, ids to embeddings, decoder layers
//! stream   StreamLayer: a decoder layer as what one stream of tokens goes through; an expert's layers, too
//! siglip   SiglipTower: SigLIP's vision tower, which several families begin with
//! tower_decoder  such a tower, a linear and decoder layers: what families of that make have in common
//! ```

pub mod family;
pub mod model;
pub mod outline;
pub mod siglip;
pub mod stream;
pub mod tower_decoder;

pub use self::{
    family::{JointFamily, JointFamilyOn},
    model::JointModel,
    outline::JointOutline,
    siglip::{SiglipSizes, SiglipTower},
    stream::{LayerKind, LayerSource, StreamLayer, StreamLinears, StreamShape},
    tower_decoder::{JointStyle, TowerDecoderFamily, TowerDecoderSizes},
};
