//! The rows of a micro-batch, as the dropout of adapters knows them: which sample they are of, and where in
//! it. What else is in the batch, and how far a row is padded, does not count.

use coxswain_nn::kernels::{
    DropoutRows, Tape,
    dropout::{row_word, sample_word},
};

use crate::pretrained::prompts::{DropoutKeys, Prompts};

/// The rows that each part of the model reads.
pub struct ModelRows<B: Tape<Base = B>> {
    /// Tokens, `[b * s]`.
    pub tokens: DropoutRows<B>,
    /// Patches of all images.
    pub patches: DropoutRows<B>,
    /// Patches where the merger has joined them.
    pub merged: DropoutRows<B>,
}

impl<B: Tape<Base = B>> ModelRows<B> {
    /// Rows of a training pass, whose images have `merge` patches a token.
    pub fn new(merge: usize, of: DropoutKeys<'_>, prompts: Prompts<'_>, device: &B::Device) -> Self {
        let device = (!B::ON_HOST).then_some(device);
        let word = |&sample: &u64| sample_word(of.seed, of.step, sample);
        let samples: Vec<u64> = of.samples.iter().map(word).collect();
        let places = prompts.rows.places(prompts.input_ids.len());
        let tokens = places.map(|(row, place)| row_word(samples[row], place.cast_unsigned()));
        let patches = patches_per_row(of.images_per_row, prompts.images);
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

/// Patches of the images of each row. They lie one image after the other, in some order within an image.
fn patches_per_row(images_per_row: &[u32], grids: &[[u32; 3]]) -> Vec<usize> {
    let mut grids = grids.iter();
    let patches = |grid: &[u32; 3]| grid.iter().map(|&side| side as usize).product::<usize>();
    let of_row = |&images: &u32| grids.by_ref().take(images as usize).map(patches).sum();
    images_per_row.iter().map(of_row).collect()
}
