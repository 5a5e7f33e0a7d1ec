//! A micro-batch before it runs: its rows, and which of their tokens are patches.

use burn::tensor::{Int, Tensor, TensorData};
use coxswain_models::pretrained::{
    error::TokenError,
    prompts::{DropoutKeys, Prompts, Rows},
};
use coxswain_nn::kernels::{
    AttentionMask, DropoutRows, ModelBackend, Tape,
    dropout::{row_word, sample_word},
    flat::Lookups,
};

use super::config::Config;

/// What all blocks share within one micro-batch.
pub struct RowsContext {
    /// Batch axis and sequence axis.
    pub axes: [usize; 2],
    /// Causal, within each row.
    pub mask: AttentionMask,
}

impl RowsContext {
    /// The context of rows that lie so among so many tokens.
    pub fn new(rows: Rows<'_>, tokens: usize) -> Self {
        let mask = match rows {
            Rows::Padded(valid) => AttentionMask::Causal(valid.into()),
            Rows::SideBySide(ends) => AttentionMask::CausalSegments(ends.into()),
        };
        Self { axes: rows.axes(tokens), mask }
    }
}

/// The tokens that patches replace, in order of patches.
pub struct PatchPlaces(Vec<u32>);

impl PatchPlaces {
    /// Checks that ids lie in the vocabulary, and that each row's image tokens are its images' patches.
    pub fn new(config: &Config, prompts: Prompts<'_>) -> Result<Self, TokenError> {
        let (ids, image, vocab) = (prompts.input_ids, config.tokens.image, config.vocab_size);
        let [_, seq] = prompts.rows.axes(ids.len());
        if let Some(at) = ids.iter().position(|&id| id as usize >= vocab) {
            let (row, position) = (at / seq.max(1), at % seq.max(1));
            return Err(TokenError::Vocabulary { row, position, id: ids[at].into(), vocab });
        }
        let (mut places, mut images) = (Vec::new(), prompts.images.iter());
        for (row, cells) in prompts.rows.cells(ids.len()).into_iter().enumerate() {
            let before = places.len();
            places.extend(cells.filter(|&cell| ids[cell] == image).map(|cell| cell as u32));
            let (tokens, mut features) = (places.len() - before, 0);
            while features < tokens {
                let Some(shape) = images.next() else { break };
                features += patches(shape);
            }
            if features != tokens {
                return Err(TokenError::ImageTokens { row, id: image, tokens, features });
            }
        }
        match images.len() {
            0 => Ok(Self(places)),
            more => {
                let given = prompts.images.len();
                Err(TokenError::ImageCount { given, used: given - more })
            }
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// `x_nd` with these of its rows replaced by `patches_md`.
    pub fn put<T: Tape>(&self, x_nd: Tensor<T, 2>, patches_md: Tensor<T, 2>) -> Tensor<T, 2> {
        let [n, _] = x_nd.dims();
        let (device, mut sources) = (x_nd.device(), (0..n as u32).collect::<Vec<_>>());
        (n as u32..).zip(&self.0).for_each(|(patch, &place)| sources[place as usize] = patch);
        Tensor::cat(vec![x_nd, patches_md], 0).select(0, indices::<T>(&sources, &device))
    }

    /// These rows of `x_nd`: what the gradient of [`PatchPlaces::put`] sends to the patches.
    pub fn taken<B: ModelBackend>(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let device = x_nd.device();
        x_nd.select(0, indices::<B>(&self.0, &device))
    }

    /// Where these ids read which rows of a table: nowhere that a patch is.
    pub fn lookups(&self, ids: &[u32]) -> Lookups {
        let mut patches = self.0.iter().peekable();
        let is_word = |(place, _): &(u32, u32)| patches.next_if(|patch| *patch == place).is_none();
        Lookups::new((0..).zip(ids.iter().copied()).filter(is_word))
    }
}

/// Indices on a device.
pub fn indices<B: ModelBackend>(rows: &[u32], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}

/// Tokens and patches, as the dropout of adapters knows them: whose they are, and where in their sample.
pub struct DropoutPlaces<B: ModelBackend> {
    /// `[n]`.
    pub tokens: DropoutRows<B>,
    /// `[m]`.
    pub patches: DropoutRows<B>,
}

impl<B: ModelBackend> DropoutPlaces<B> {
    /// Places of the rows of a training pass.
    pub fn new(of: DropoutKeys<'_>, prompts: Prompts<'_>, device: &B::Device) -> Self {
        let device = (!B::ON_HOST).then_some(device);
        let samples: Vec<_> =
            of.samples.iter().map(|&sample| sample_word(of.seed, of.step, sample)).collect();
        let places = prompts.rows.places(prompts.input_ids.len());
        let tokens = places.map(|(row, place)| row_word(samples[row], place.cast_unsigned())).collect();
        let mut images = prompts.images.iter();
        let of_row = |(&sample, &count): (&u64, &u32)| {
            let count: usize = images.by_ref().take(count as usize).map(patches).sum();
            (0..count as u64).map(move |patch| row_word(sample, patch))
        };
        let patches = samples.iter().zip(of.images_per_row).flat_map(of_row).collect();
        Self { tokens: DropoutRows::new(tokens, device), patches: DropoutRows::new(patches, device) }
    }
}

/// Patches of an image.
fn patches(shape: &[u32; 3]) -> usize {
    shape.iter().map(|&side| side as usize).product()
}
