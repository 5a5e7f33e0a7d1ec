//! What memory is held for, and predictions laid beside measurements.
//!
//! One list of categories for predictions, measurements and messages, so that the three can be laid side by
//! side. What it does not do: predict or measure; workers do both, and everybody shows it.

use serde::{Deserialize, Serialize};

use crate::{human, v1};

/// What a piece of a worker's memory is held for.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::Display,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "lowercase")]
pub enum Category {
    /// Weights of the vision-language model: never trained.
    #[strum(to_string = "frozen weights")]
    FrozenWeights,
    /// The flat parameter buffer of everything that trains, in fp32; a rank's part of it is its master copy.
    Trainables,
    /// The flat gradients, full length on every rank until they are reduced.
    Gradients,
    /// AdamW's two moments, this rank's part.
    #[strum(to_string = "optimizer shard")]
    OptimizerShard,
    /// A copy of another rank's part of weights and moments, so that losing that one costs no rollback.
    #[serde(rename = "mirror")]
    #[strum(to_string = "replica of another rank")]
    Replica,
    /// What forward and backward of one micro-batch hold at their worst moment.
    Activations,
    /// What the communicator holds for itself.
    #[strum(to_string = "collective buffers")]
    CollectiveBuffers,
    /// Micro-batches read ahead, and rows of the data set kept decoded.
    Input,
    /// Names of samples, the index of stored features, and adapters of cache generations.
    Cache,
    /// What is held whatever is trained: runtime, tokenizer, scratch of the compute threads.
    Framework,
}

impl Category {
    /// All of them, in the order in which tables show them.
    pub const ALL: [Self; 10] = [
        Self::FrozenWeights,
        Self::Trainables,
        Self::Gradients,
        Self::OptimizerShard,
        Self::Replica,
        Self::Activations,
        Self::CollectiveBuffers,
        Self::Input,
        Self::Cache,
        Self::Framework,
    ];
}

/// A category, predicted and measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRow {
    /// Which.
    pub category: Category,
    /// Bytes predicted.
    pub predicted: u64,
    /// Bytes measured; none where it cannot be told apart from the rest.
    pub measured: Option<u64>,
}

impl MemoryRow {
    /// Signed error of the prediction, relative to what was measured.
    pub fn error(&self) -> Option<f64> {
        self.measured.filter(|&measured| measured > 0).map(|measured| relative(self.predicted, measured))
    }
}

/// One rank's memory, predicted for the run as it goes and measured so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Predicted peak, corrected by what earlier runs have taught.
    pub predicted: u64,
    /// Largest peak of the steps so far.
    pub measured: u64,
    /// Earlier runs that the correction rests on; 0 where the prediction is made of sizes alone.
    pub runs: u32,
    /// By category, without correction.
    pub categories: Vec<MemoryRow>,
}

impl Comparison {
    /// Signed error of the prediction, relative to what was measured.
    pub fn error(&self) -> Option<f64> {
        (self.measured > 0).then(|| relative(self.predicted, self.measured))
    }
}

impl Comparison {
    /// What the prediction rests on: `from sizes alone`, `from 3 earlier runs`.
    pub fn basis(&self) -> String {
        match self.runs {
            0 => "from sizes alone".to_owned(),
            1 => "from 1 earlier run".to_owned(),
            runs => format!("from {runs} earlier runs"),
        }
    }

    /// A heading, a line for each category, and the peak; at most 62 columns wide.
    pub fn table(&self) -> Vec<String> {
        let line = |name: &str, predicted: u64, measured: Option<u64>, error: Option<f64>| {
            let measured = measured.map_or_else(|| "-".to_owned(), human::bytes);
            // A category that is hardly there is off by any percentage.
            let error = error.map_or_else(
                || "-".to_owned(),
                |error| {
                    if error < 10.0 {
                        format!("{:+.1} %", 100.0 * error)
                    } else {
                        format!("{:.0} x", 1.0 + error)
                    }
                },
            );
            format!("{name:<28}{:>11}{measured:>12}{error:>10}", human::bytes(predicted))
        };
        let mut lines = vec![format!("{:<28}{:>11}{:>12}{:>10}", "", "predicted", "measured", "error")];
        let categories = self.categories.iter();
        lines.extend(
            categories.map(|of| line(&of.category.to_string(), of.predicted, of.measured, of.error())),
        );
        let peak = format!("peak, {}", self.basis());
        lines.push(line(&peak, self.predicted, Some(self.measured), self.error()));
        lines
    }

    /// The table with `rank N` in its heading.
    pub fn table_of(&self, rank: u32) -> Vec<String> {
        let mut lines = self.table();
        // The heading's first column is free, and wider than any rank.
        let title = format!("rank {rank}");
        lines[0].replace_range(..title.len(), &title);
        lines
    }
}

/// How far `predicted` is from `measured`, relative to the latter.
pub fn relative(predicted: u64, measured: u64) -> f64 {
    (predicted as f64 - measured as f64) / measured as f64
}

impl From<Category> for v1::MemoryCategory {
    fn from(category: Category) -> Self {
        match category {
            Category::FrozenWeights => Self::FrozenWeights,
            Category::Trainables => Self::Trainables,
            Category::Gradients => Self::Gradients,
            Category::OptimizerShard => Self::OptimizerShard,
            Category::Replica => Self::Replica,
            Category::Activations => Self::Activations,
            Category::CollectiveBuffers => Self::CollectiveBuffers,
            Category::Input => Self::Input,
            Category::Cache => Self::Cache,
            Category::Framework => Self::Framework,
        }
    }
}

impl From<&Comparison> for v1::MemoryComparison {
    fn from(of: &Comparison) -> Self {
        let category = |of: &MemoryRow| v1::CategoryMemory {
            category: v1::MemoryCategory::from(of.category).into(),
            predicted: of.predicted,
            measured: of.measured,
        };
        Self {
            predicted: of.predicted,
            measured: of.measured,
            runs: of.runs,
            categories: of.categories.iter().map(category).collect(),
        }
    }
}

/// A category that this version does not know is left out: the totals have it.
impl From<v1::MemoryComparison> for Comparison {
    fn from(wire: v1::MemoryComparison) -> Self {
        let known = |number: i32| {
            Category::ALL.into_iter().find(|known| i32::from(v1::MemoryCategory::from(*known)) == number)
        };
        let category = |of: v1::CategoryMemory| {
            let category = known(of.category)?;
            Some(MemoryRow { category, predicted: of.predicted, measured: of.measured })
        };
        Self {
            predicted: wire.predicted,
            measured: wire.measured,
            runs: wire.runs,
            categories: wire.categories.into_iter().filter_map(category).take(Category::ALL.len()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_category_and_fits_a_terminal_with_a_clock_in_front() {
        let of = |category, measured| MemoryRow { category, predicted: 3 << 30, measured };
        let hardly = of(Category::Cache, Some(20 << 20));
        let categories = vec![of(Category::FrozenWeights, Some(2 << 30)), of(Category::Input, None), hardly];
        let table = Comparison { predicted: 98 << 20, measured: 100 << 20, runs: 12, categories }.table();
        assert_eq!(
            table,
            [
                "                              predicted    measured     error",
                "frozen weights                  3.0 GiB     2.0 GiB   +50.0 %",
                "input                           3.0 GiB           -         -",
                "cache                           3.0 GiB    20.0 MiB     154 x",
                "peak, from 12 earlier runs     98.0 MiB   100.0 MiB    -2.0 %",
            ]
        );
        assert!(table.iter().all(|line| line.len() <= 62));
    }

    #[test]
    fn a_comparison_survives_the_wire_and_an_unknown_category_is_left_out() {
        let of = |category| MemoryRow { category, predicted: 5, measured: Some(4) };
        let comparison =
            Comparison { predicted: 110, measured: 100, runs: 2, categories: Category::ALL.map(of).into() };
        let mut wire = v1::MemoryComparison::from(&comparison);
        wire.categories.insert(0, v1::CategoryMemory { category: 77, predicted: 1, measured: None });
        assert_eq!(Comparison::from(wire), comparison);
        assert_eq!(comparison.error(), Some(0.1));
        assert_eq!(comparison.categories[0].error(), Some(0.25));
        assert_eq!(Comparison::default().error(), None);
    }
}
