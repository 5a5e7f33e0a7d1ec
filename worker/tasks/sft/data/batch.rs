//! A chat as training sees it, and chats side by side: plain host memory.
//!
//! ```text
//! input_ids   first chat | second | third      ends   0, e1, e2, n
//! ```
//!
//! Nothing is padded: the tokens of a batch are its chats' own, one chat behind the other, and the model
//! keeps them apart (`CausalSegments`, positions from 0 in each). So the width of a batch is its chats'
//! total, not their number times the longest.

use std::sync::Arc;

use coxswain_models::pretrained::{
    pictures::ImageShape,
    prompts::{Prompts, Rows},
};
use coxswain_nn::next_token::TokenTargets;
use coxswain_proto::ids::Step;
use coxswain_task::{Batch, Sample};

/// A chat, encoded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatSample {
    /// Place in the file.
    pub index: u64,
    /// One id per token, image placeholders expanded.
    pub input_ids: Vec<u32>,
    /// Whether predicting it is learned, for each token.
    pub learned: Vec<bool>,
    /// Patches of all images, in order: `[patches, patch values]`, row-major. Batches share them.
    pub pixel_values: Arc<Vec<f32>>,
    /// `(t, h, w)` in patches, one per image.
    pub image_shapes: Vec<ImageShape>,
    /// Tokens at its end that were cut off.
    pub cut: usize,
}

/// Chats of one forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatBatch {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Places in the file.
    pub indices: Vec<u64>,
    /// Token ids of all chats, `[n]`.
    pub input_ids: Vec<u32>,
    /// Whether predicting it is learned, for each token of all chats.
    pub learned: Vec<bool>,
    /// Where each chat ends among them, and before it the 0 where the first begins.
    pub ends: Vec<u32>,
    /// `[patches, patch values]` of all images of each chat.
    pub pixel_values: Vec<Arc<Vec<f32>>>,
    /// One per image, in order of chats.
    pub image_shapes: Vec<ImageShape>,
    /// Images of each chat.
    pub images_per_chat: Vec<u32>,
}

impl ChatBatch {
    /// These chats, in this order.
    pub fn from_samples(step: Step, samples: &[&ChatSample]) -> Self {
        let mut batch = Self { step, ends: vec![0], ..Self::default() };
        for sample in samples {
            batch.indices.push(sample.index);
            batch.input_ids.extend_from_slice(&sample.input_ids);
            batch.learned.extend_from_slice(&sample.learned);
            batch.ends.push(batch.input_ids.len() as u32);
            batch.pixel_values.push(sample.pixel_values.clone());
            batch.image_shapes.extend_from_slice(&sample.image_shapes);
            batch.images_per_chat.push(sample.image_shapes.len() as u32);
        }
        batch
    }

    /// What [`ChatBatch::from_samples`] was given.
    pub fn apart(&self) -> Vec<ChatSample> {
        let mut grids = &self.image_shapes[..];
        let mut samples = Vec::with_capacity(self.indices.len());
        for (chat, &index) in self.indices.iter().enumerate() {
            let (image_shapes, other_grids) = grids.split_at(self.images_per_chat[chat] as usize);
            grids = other_grids;
            let tokens = self.ends[chat] as usize..self.ends[chat + 1] as usize;
            samples.push(ChatSample {
                index,
                input_ids: self.input_ids[tokens.clone()].to_vec(),
                learned: self.learned[tokens].to_vec(),
                pixel_values: self.pixel_values[chat].clone(),
                image_shapes: image_shapes.to_vec(),
                cut: 0,
            });
        }
        samples
    }

    /// What is predicted: every learned token, from the one before it.
    pub fn targets(&self) -> TokenTargets {
        let mut targets = TokenTargets::default();
        for chat in self.ends.windows(2) {
            // Its first token is predicted from nothing.
            for at in (chat[0] + 1..chat[1]).filter(|&at| self.learned[at as usize]) {
                targets.rows.push(at - 1);
                targets.ids.push(self.input_ids[at as usize]);
            }
        }
        targets
    }

    /// The chat that this token is of, by its place in the file.
    pub fn chat_at(&self, token: u32) -> u64 {
        self.indices[self.ends.partition_point(|&end| end <= token) - 1]
    }

    /// What the model reads of it.
    pub fn prompts(&self) -> Prompts<'_> {
        Prompts {
            input_ids: &self.input_ids,
            rows: Rows::SideBySide(&self.ends),
            images: &self.image_shapes,
            pixel_values: &self.pixel_values,
        }
    }
}

impl Sample for ChatSample {
    fn index(&self) -> u64 {
        self.index
    }
}

impl Batch for ChatBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn cells(&self) -> usize {
        self.input_ids.len()
    }

    fn bytes(&self) -> u64 {
        let pixels: usize = self.pixel_values.iter().map(|chat| chat.len()).sum();
        (4 * (pixels + self.input_ids.len()) + self.learned.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(index: u64, ids: &[u32], learned: &[bool], images: usize) -> ChatSample {
        let pixel_values =
            (0..images * 8).map(|value| value as f32 + index as f32).collect::<Vec<_>>().into();
        ChatSample {
            index,
            input_ids: ids.into(),
            learned: learned.into(),
            pixel_values,
            image_shapes: vec![[1, 2, 2]; images],
            cut: 0,
        }
    }

    #[test]
    fn chats_come_apart_as_they_were_put_together_and_answers_are_predicted_from_the_token_before() {
        let samples = [
            sample(7, &[1, 2, 3, 4], &[false, false, true, true], 1),
            sample(3, &[5, 6], &[true, true], 0),
            sample(9, &[8, 9, 1], &[false, true, false], 2),
        ];
        let batch = ChatBatch::from_samples(Step(2), &samples.iter().collect::<Vec<_>>());
        assert_eq!((batch.cells(), batch.tokens(), &batch.ends[..]), (9, 9, &[0, 4, 6, 9][..]));
        assert_eq!([0, 3, 4, 5, 6, 8].map(|token| batch.chat_at(token)), [7, 7, 3, 3, 9, 9]);
        assert_eq!(batch.apart(), samples);
        // The first token of the second chat is predicted from nothing.
        let targets = TokenTargets { rows: vec![1, 2, 4, 6], ids: vec![3, 4, 6, 9] };
        assert_eq!(batch.targets(), targets);
        let none = ChatBatch::from_samples(Step(0), &[]);
        assert!(none.apart().is_empty() && none.targets() == TokenTargets::default());
    }
}
