//! A row of the table, and rows side by side: plain host memory. The engine asks them for their sizes only.

use coxswain_proto::ids::Step;
use coxswain_task::{Batch, Sample};

/// A row.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Place in the table.
    pub index: u64,
    /// `[inputs]`.
    pub inputs: Vec<f32>,
    /// What is to come out.
    pub target: f32,
}

/// Rows of one forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Places in the table.
    pub indices: Vec<u64>,
    /// `[rows, inputs]`.
    pub inputs: Vec<f32>,
    /// `[rows]`.
    pub targets: Vec<f32>,
}

impl Rows {
    /// These rows, in this order.
    pub fn of(step: Step, rows: &[&Row]) -> Self {
        Self {
            step,
            indices: rows.iter().map(|row| row.index).collect(),
            inputs: rows.iter().flat_map(|row| &row.inputs).copied().collect(),
            targets: rows.iter().map(|row| row.target).collect(),
        }
    }

    /// What [`Rows::of`] was given.
    pub fn apart(&self) -> impl Iterator<Item = Row> {
        let width = self.inputs.len() / self.indices.len().max(1);
        let rows = self.indices.iter().zip(self.inputs.chunks(width.max(1))).zip(&self.targets);
        rows.map(|((&index, inputs), &target)| Row { index, inputs: inputs.to_vec(), target })
    }
}

impl Sample for Row {
    fn index(&self) -> u64 {
        self.index
    }
}

impl Batch for Rows {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn tokens(&self) -> u64 {
        self.indices.len() as u64
    }

    fn cells(&self) -> usize {
        self.indices.len()
    }

    fn bytes(&self) -> u64 {
        4 * (self.inputs.len() + self.targets.len()) as u64
    }
}
