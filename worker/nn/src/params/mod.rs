//! Everything that trains, in one flat fp32 parameter buffer.
//!
//! ```text
//! TrainableLayout   names, shapes, groups, offsets          known before any tensor exists (`layout`)
//! Trainables<B>     the values: one flat tensor, and a view of it per parameter (`values`)
//! ParamScope<T>     the same parameters as leaves of one tape, while one block runs
//! BaseWeight<B, D>  a weight of the pretrained model: frozen, or one of the parameters (`weight`)
//! Cuts              where the buffer is cut into parts, one a rank (`cuts`)
//! Notes<B>          outputs that one run of a block leaves to the next (`notes`), in the type of `held`
//! FlatGrads<F>      gradients summed over micro-batches, same offsets, where the values lie (`gradients`)
//! ```
//!
//! Frozen weights never come here. The optimizer (`zero`) sees only the flat parameter buffer and never
//! learns what a model is.

mod cuts;
mod decomposed;
mod gradients;
pub mod held;
mod layout;
mod notes;
mod values;
mod weight;

pub use self::{
    cuts::{Cuts, Grain},
    gradients::{FlatGrads, GradientSums},
    layout::{Group, Init, ParamId, ParamSpec, TrainableLayout, chunk},
    notes::{Keep, LinearInputs, NotedLinear, Notes},
    values::{ParamScope, Trainables},
    weight::BaseWeight,
};
