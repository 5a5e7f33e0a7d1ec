//! How an expert's tensors come into the layout: as trainables, or as constants that are brought, with or
//! without adapters.

use coxswain_nn::{
    dense::{Dense, DenseShape},
    lora::LoraPlan,
    params::{Init, ParamId, TrainableLayout},
};

use crate::vla_flow::EXPERT;

/// What trains of an expert.
#[derive(Clone, Copy, Debug)]
pub enum Learning<'a> {
    /// All of it.
    Whole,
    /// Low-rank adapters of these linears; the expert itself is brought (`train.init_from`) and stays what it
    /// is.
    Adapters(&'a LoraPlan),
    /// Nothing of one that is brought.
    Nothing,
}

impl<'a> Learning<'a> {
    /// What is learned of an expert that trains, or of one that is brought, with these adapters.
    pub fn new(train: bool, adapters: Option<&'a LoraPlan>) -> Self {
        match adapters {
            _ if train => Self::Whole,
            Some(plan) => Self::Adapters(plan),
            None => Self::Nothing,
        }
    }
}

/// Registers an expert's tensors.
pub(in crate::vla_flow) struct Registrar<'l> {
    pub layout: &'l mut TrainableLayout,
    pub learning: Learning<'l>,
}

impl Registrar<'_> {
    /// `expert.{name}`, a linear layer.
    pub fn dense(&mut self, name: &str, shape: DenseShape) -> Dense {
        let name = format!("expert.{name}");
        let plan = match self.learning {
            Learning::Whole => return Dense::register(self.layout, EXPERT, &name, shape),
            Learning::Adapters(plan) => Some(plan),
            Learning::Nothing => None,
        };
        Dense::register_constant(self.layout, EXPERT, &name, shape, plan)
    }

    /// `expert.{name}`, a tensor without weight decay.
    pub fn tensor(&mut self, name: &str, shape: &[usize], init: Init) -> ParamId {
        let name = format!("expert.{name}");
        match self.learning {
            Learning::Whole => self.layout.add(name, shape, EXPERT, false, init),
            Learning::Adapters(_) | Learning::Nothing => self.layout.add_constant(name, shape, EXPERT),
        }
    }
}
