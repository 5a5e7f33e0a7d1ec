//! The model as the engine trains it.

use std::{path::Path, sync::Arc};

use coxswain_models::pretrained::{
    adapters::readme,
    directory,
    error::ModelError,
    frozen::{FrozenPart, frozen_parts},
    merge::{TrainedModel, write_merged},
};
use coxswain_nn::{
    kernels::Tape,
    lora::AdapterOrigin,
    params::{GradientSums, TrainableLayout, Trainables},
    sharded::{Cut, HeldParts, Peers},
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{
    Artifact, Batch, Evaluation, Example, MicroLoss, Module, Objective, Samples, StageClock, TaskError,
};

use super::{
    config::SftSettings,
    data::{ChatBatch, Chats},
    examples::examples,
    model::{ChatModel, tuned},
};
use crate::{pretrained, tokens::sums::TokenSums};

/// What held-out chats are measured by: nats for each learned token, `e` to the power of that, and how many
/// of these tokens are the likeliest at their place.
const MEASURES: [&str; 3] = ["loss", PERPLEXITY, "token_accuracy"];
const PERPLEXITY: &str = "perplexity";

/// Parts of what trains, as tables name them.
const PARTS: [&str; 3] = ["vision", "language", "head"];

/// A model, and the run that it is trained by.
pub(super) struct SftObjective<B: Tape<Base = B>> {
    pub(super) model: ChatModel<B>,
    pub(super) spec: RunSpec,
    pub(super) settings: SftSettings,
}

impl<B: Tape<Base = B>> Objective<B> for SftObjective<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        self.model.forward_backward(trainables, batch.content(), grads, clock)
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        Ok(self.model.answers(trainables, batch.content())?.loss())
    }

    fn measures(&self) -> &'static [&'static str] {
        &MEASURES
    }

    fn measure(&self, name: &str, mean: f64) -> f64 {
        if name == PERPLEXITY { mean.exp() } else { mean }
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let TokenSums { loss_sum, right, tokens } = self.model.answers(trainables, batch.content())?;
        Ok(Evaluation { count: tokens, sums: vec![loss_sum, loss_sum, right], ..Evaluation::default() })
    }

    fn examples(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Vec<Example>, TaskError> {
        let Some(chats) = samples.downcast_ref::<Chats>() else { return Ok(Vec::new()) };
        examples(&self.model, trainables, chats, &batch.content::<ChatBatch>().indices)
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        let (model, dtype) = (self.model.pretrained(), self.settings.model.weights_dtype);
        let outline = model.outline();
        let mut tensors: Vec<_> = outline.tensors().into_iter().chain(outline.head()).collect();
        tensors.retain(|tensor| !self.model.full().trains(&tensor.name));
        let parts = frozen_parts(&tensors, dtype, model.in_memory(), model.table_place());
        let frozen = parts.into_iter().map(|part| {
            let FrozenPart { name, tensors, elements: parameters, bytes, dtype } = part;
            Module { module: name.into(), tensors, parameters, trains: false, dtype, bytes }
        });
        frozen
            .chain(pretrained::trained_rows(layout, &PARTS, |tensor| {
                pretrained::part_of(outline.rules, tensor)
            }))
            .collect()
    }

    fn base(&self) -> &str {
        &self.settings.model.path
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        let outline = self.model.pretrained().outline();
        let tuned = tuned(&self.settings, outline).map_err(TaskError::bad_input)?;
        let (model, seed) = (&self.settings.model, self.spec.run.seed);
        pretrained::initial_values::<B>(&tuned, model, outline.rules, layout, seed)
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let base_model = &self.settings.model.path;
        let outline = self.model.pretrained().outline();
        let readme = readme(base_model, outline.class, "Fine-tuned by Coxswain on chats.");
        let tied = outline.tied_to_head();
        let tied = tied.as_deref();
        let trained_above = Some(self.settings.model.weights_dtype);
        let origin = AdapterOrigin { base_model, task_type: None, readme: &readme, tied, trained_above };
        pretrained::leave(dir, self.model.lora(), layout, values, &origin)
    }

    fn export_merged(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Option<Result<(), TaskError>> {
        let outline = self.model.pretrained().outline();
        let (rules, tied) = (outline.rules, outline.tied_to_head());
        let trained = TrainedModel {
            rules,
            tied: tied.as_deref(),
            joined: None,
            plan: self.model.lora(),
            layout,
            values,
        };
        let merged = directory::whole(&self.settings.model.path)
            .map_err(ModelError::from)
            .and_then(|model| write_merged(&model, dir, trained));
        Some(merged.map_err(TaskError::io))
    }

    fn most_streamed(&self) -> u64 {
        self.model.most_streamed()
    }

    fn held_parts(&self) -> Option<Arc<dyn HeldParts>> {
        Some(Arc::new(self.model.pretrained().shared_blocks()?))
    }

    fn share_out(&self, cut: Cut, peers: &Arc<dyn Peers>) -> Result<(), TaskError> {
        self.model.pretrained().share_out(cut, peers).map_err(TaskError::io)
    }
}
