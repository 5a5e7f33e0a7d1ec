//! The rows of a micro-batch, as the dropout of adapters knows them: which sample they are of, and where in
//! it. What else is in the batch, and how far a row is padded, does not count.

use coxswain_nn::{
    kernels::{
        DropoutRows, Tape,
        dropout::{row_word, sample_word},
    },
    lora::LoraPlan,
};

use super::{config::QwenConfig, prompts::Prompts};

/// Whose rows they are: what keys their draws, besides a row's place in its sample.
#[derive(Clone, Copy, Debug)]
pub struct RowsOf<'b> {
    /// The run's.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Of each row of the micro-batch.
    pub samples: &'b [u64],
    /// The same.
    pub images_per_row: &'b [u32],
}

/// The rows that each part of the model reads.
pub struct ModelRows<B: Tape<Base = B>> {
    /// Tokens, `[b * s]`.
    pub tokens: DropoutRows<B>,
    /// Patches of all images.
    pub patches: DropoutRows<B>,
    /// The same where the merger has joined them.
    pub merged: DropoutRows<B>,
}

impl<B: Tape<Base = B>> ModelRows<B> {
    /// Of a training pass; none where this plan's adapters drop nothing.
    pub fn of_training(
        plan: Option<&LoraPlan>,
        config: &QwenConfig,
        of: RowsOf<'_>,
        prompts: Prompts<'_>,
        device: &B::Device,
    ) -> Option<Self> {
        let drops = plan.is_some_and(|plan| plan.recipe().dropout > 0.0);
        drops.then(|| Self::new(config.vision.merge_unit(), of, prompts, device))
    }

    fn new(merge: usize, of: RowsOf<'_>, prompts: Prompts<'_>, device: &B::Device) -> Self {
        let device = (!B::ON_HOST).then_some(device);
        let word = |&sample: &u64| sample_word(of.seed, of.step, sample);
        let samples: Vec<u64> = of.samples.iter().map(word).collect();
        let places = prompts.rows.places(prompts.input_ids.len());
        let tokens = places.map(|(row, place)| row_word(samples[row], place.cast_unsigned()));
        let patches = patches_per_row(of.images_per_row, prompts.image_grids);
        let of_images = |unit: usize| {
            let rows = samples.iter().zip(&patches);
            let words = rows.flat_map(|(&sample, &patches)| {
                (0..(patches / unit) as u64).map(move |at| row_word(sample, at))
            });
            DropoutRows::new(words.collect(), device)
        };
        Self {
            tokens: DropoutRows::new(tokens.collect(), device),
            patches: of_images(1),
            merged: of_images(merge.max(1)),
        }
    }
}

/// Patches of the images of each row. They lie one image after the other, in windows within an image.
fn patches_per_row(images_per_row: &[u32], grids: &[[u32; 3]]) -> Vec<usize> {
    let mut grids = grids.iter();
    let patches = |grid: &[u32; 3]| grid.iter().map(|&side| side as usize).product::<usize>();
    let of_row = |&images: &u32| grids.by_ref().take(images as usize).map(patches).sum();
    images_per_row.iter().map(of_row).collect()
}
