//! How an expert's tensors come into the layout: as trainables, or as constants that are brought.

use coxswain_nn::{
    dense::{Dense, DenseShape},
    params::{Init, ParamId, TrainableLayout},
};

use crate::vla_flow::EXPERT;

/// Whether an expert trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learning {
    /// All of it.
    Whole,
    /// Nothing: it is brought (`train.init_from`) and stays what it is.
    Nothing,
}

/// Registers an expert's tensors.
pub(super) struct Registrar<'l> {
    pub layout: &'l mut TrainableLayout,
    pub learning: Learning,
}

impl Registrar<'_> {
    /// `expert.{name}`, a linear layer.
    pub fn dense(&mut self, name: &str, shape: DenseShape) -> Dense {
        let name = format!("expert.{name}");
        match self.learning {
            Learning::Whole => Dense::register(self.layout, EXPERT, &name, shape),
            Learning::Nothing => Dense::register_constant(self.layout, EXPERT, &name, shape),
        }
    }

    /// `expert.{name}`, a tensor without weight decay.
    pub fn tensor(&mut self, name: &str, shape: &[usize], init: Init) -> ParamId {
        let name = format!("expert.{name}");
        match self.learning {
            Learning::Whole => self.layout.add(name, shape, EXPERT, false, init),
            Learning::Nothing => self.layout.add_constant(name, shape, EXPERT),
        }
    }
}
