//! `cox profile`: where the time and the memory of a few steps go, in one process on the CPU.
//!
//! ```text
//! commands::profile ─▶ take: the trainer of `cox worker`, with a link that records ─▶ Profile
//!                                                    text (tables) ◀── flame (SVG) ◀────┘
//! ```
//!
//! The spans are `coxswain_nn::profile`'s: phases come by the link, stages by the task's clock, layers by the
//! tower, operations by the CPU's kernels. What has no span is the time of what it lies in.

mod flame;
mod taken;
mod text;

pub use self::{
    flame::flame_graph,
    taken::{Profile, take},
    text::tables,
};
