//! What is known of a run, as one value: `cox run`, `cox watch` and `cox top` draw it, each in its own way.

mod run_view;
mod series;

pub use run_view::{RunView, Source, Update};
pub use series::Series;
