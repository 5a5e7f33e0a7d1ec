//! What tests of this task, and of the engine on it, are made with: nothing of it is in `cox`.
//!
//! ```text
//! assets      what ships with the repository, and a run of it
//! recording   data sets written on the spot     table    their parquet files
//! pair        two of them, as a mixture
//! gr00t       a policy of LeRobot's
//! small       a policy on the small checkpoint that ships with the repository, and batches for it
//! ```

mod assets;
#[cfg(test)]
pub mod gr00t;
pub mod pair;
pub mod recording;
pub mod small;
pub mod table;

pub use assets::{assets, mini, spec};
