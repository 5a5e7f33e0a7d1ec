//! Pairs of texts: a table with a column that is read and one that is written.
//!
//! ```text
//! table     a record's fields by the file's kind: JSON lines, CSV, TSV
//! pairs     the opened file: checked, and its samples one by one
//! batch     a sample, a micro-batch, and the one from the other
//! outline   sizes of samples, for the prediction of memory
//! ```

mod batch;
mod outline;
mod pairs;
mod table;

pub use batch::{PairBatch, PairSample};
pub use outline::PairOutline;
pub use pairs::Pairs;
pub(super) use table::Table;
pub use table::{Pair, columns};
