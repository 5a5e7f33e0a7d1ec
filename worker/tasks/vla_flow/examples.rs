//! Held-out samples for people: what the cameras show, and each dimension of the actions beside the sampled
//! one.

use coxswain_models::pretrained::pictures::Rgb;
use coxswain_task::{CurvePair, Example, ExamplePicture};

use super::{
    data::{MicroBatch, RunData},
    measures::denormalize,
};

/// Examples of the samples of a batch, with sampled actions `[rows, horizon, width]`, normalised. They are in
/// the units of their data sets, without steps past an episode's end.
pub(super) fn examples(batch: &MicroBatch, data: &dyn RunData, mut sampled: Vec<f32>) -> Vec<Example> {
    let mut recorded = batch.actions.clone();
    for actions in [&mut sampled, &mut recorded] {
        denormalize(batch, data, actions);
    }
    let (width, horizon) = (data.dims().action.max(1), data.dims().horizon.max(1));
    let mut examples = Vec::new();
    for (row, &sample) in batch.sample_indices.iter().enumerate() {
        let valid = &batch.action_valid[row * horizon..][..horizon];
        let of = |actions: &[f32], dim: usize| {
            let steps = actions[row * horizon * width..].chunks(width).zip(valid);
            steps.filter(|(_, valid)| **valid > 0.0).map(|(action, _)| action[dim]).collect()
        };
        let names = data.action_names(sample);
        let curve = |dim: usize| CurvePair {
            name: names.get(dim).cloned().unwrap_or_else(|| format!("action {dim}")),
            reference: of(&recorded, dim),
            predicted: of(&sampled, dim),
        };
        let (title, cameras) = data.scene(sample);
        let pictures = cameras.into_iter().filter_map(|(name, picture)| {
            let Rgb { height, width, pixels } = picture;
            ExamplePicture::of_rgb(name, [height, width], &pixels)
        });
        examples.push(Example {
            sample,
            title,
            pictures: pictures.collect(),
            curves: (0..batch.action_widths[row].min(width)).map(curve).collect(),
            texts: Vec::new(),
        });
    }
    examples
}
