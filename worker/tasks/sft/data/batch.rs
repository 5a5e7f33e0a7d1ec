//! A chat as training sees it, and chats side by side: plain host memory. Rows are padded on the right.

use std::{any::Any, ops::Range};

use coxswain_models::qwen2_5_vl::prompts::Prompts;
use coxswain_proto::ids::Step;
use coxswain_task::{Batch, Sample};

/// A chat, encoded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatSample {
    /// Its place in the file.
    pub index: u64,
    /// One id per token, image placeholders expanded.
    pub input_ids: Vec<u32>,
    /// Of each token, whether predicting it is learned.
    pub learned: Vec<bool>,
    /// Patches of all images, in order: `[patches, patch values]`, row-major.
    pub pixel_values: Vec<f32>,
    /// `(t, h, w)` in patches, one per image.
    pub image_grids: Vec<[u32; 3]>,
}

/// Chats of one forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatBatch {
    /// The optimizer step that they belong to.
    pub step: Step,
    /// Their places in the file.
    pub indices: Vec<u64>,
    /// `[b, s]` row-major, padded on the right.
    pub input_ids: Vec<u32>,
    /// `[b, s]`, false at padding.
    pub learned: Vec<bool>,
    /// Valid tokens of each row, from 0.
    pub valid: Vec<Range<u32>>,
    /// Padded length, `s`.
    pub seq_len: usize,
    /// `[patches, patch values]` of all images of all rows, in order.
    pub pixel_values: Vec<f32>,
    /// One per image, in order of rows.
    pub image_grids: Vec<[u32; 3]>,
    /// Images of each row.
    pub images_per_row: Vec<u32>,
}

/// Tokens that are predicted: from which row of the flattened batch, and what is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Rows of `[b * s]`, ascending.
    pub rows: Vec<u32>,
    /// The token behind each.
    pub ids: Vec<u32>,
}

impl ChatBatch {
    /// These chats, in this order; `pad` fills up shorter ones.
    pub fn of(step: Step, samples: &[&ChatSample], pad: u32) -> Self {
        let seq_len = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap_or(0);
        let mut batch = Self { step, seq_len, ..Self::default() };
        for sample in samples {
            let len = sample.input_ids.len();
            batch.indices.push(sample.index);
            batch.input_ids.extend_from_slice(&sample.input_ids);
            batch.input_ids.extend(std::iter::repeat_n(pad, seq_len - len));
            batch.learned.extend_from_slice(&sample.learned);
            batch.learned.extend(std::iter::repeat_n(false, seq_len - len));
            batch.valid.push(0..len as u32);
            batch.pixel_values.extend_from_slice(&sample.pixel_values);
            batch.image_grids.extend_from_slice(&sample.image_grids);
            batch.images_per_row.push(sample.image_grids.len() as u32);
        }
        batch
    }

    /// What [`ChatBatch::of`] was given.
    pub fn apart(&self) -> Vec<ChatSample> {
        let patches = |grids: &[[u32; 3]]| -> usize {
            grids.iter().map(|grid| grid.iter().map(|&side| side as usize).product::<usize>()).sum()
        };
        let patch_values = self.pixel_values.len() / patches(&self.image_grids).max(1);
        let (mut grids, mut pixels) = (&self.image_grids[..], &self.pixel_values[..]);
        let mut samples = Vec::with_capacity(self.indices.len());
        for (row, &index) in self.indices.iter().enumerate() {
            let (image_grids, other_grids) = grids.split_at(self.images_per_row[row] as usize);
            let (pixel_values, other_pixels) = pixels.split_at(patch_values * patches(image_grids));
            (grids, pixels) = (other_grids, other_pixels);
            let tokens = row * self.seq_len..row * self.seq_len + self.valid[row].len();
            samples.push(ChatSample {
                index,
                input_ids: self.input_ids[tokens.clone()].to_vec(),
                learned: self.learned[tokens].to_vec(),
                pixel_values: pixel_values.to_vec(),
                image_grids: image_grids.to_vec(),
            });
        }
        samples
    }

    /// What is predicted: every learned token, from the one before it.
    pub fn targets(&self) -> Targets {
        let mut targets = Targets::default();
        for (at, _) in self.learned.iter().enumerate().filter(|(_, learned)| **learned) {
            // A row's first token is predicted from nothing.
            if !at.is_multiple_of(self.seq_len) {
                targets.rows.push(at as u32 - 1);
                targets.ids.push(self.input_ids[at]);
            }
        }
        targets
    }

    /// What the model reads of it.
    pub fn prompts(&self) -> Prompts<'_> {
        Prompts {
            input_ids: &self.input_ids,
            valid: &self.valid,
            image_grids: &self.image_grids,
            pixel_values: &self.pixel_values,
        }
    }
}

impl Sample for ChatSample {
    fn index(&self) -> u64 {
        self.index
    }

    fn boxed(&self) -> Box<dyn Sample> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn Sample) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Batch for ChatBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.indices
    }

    fn tokens(&self) -> u64 {
        self.valid.iter().map(|row| row.len() as u64).sum()
    }

    fn cells(&self) -> usize {
        self.input_ids.len()
    }

    fn bytes(&self) -> u64 {
        (4 * (self.pixel_values.len() + self.input_ids.len()) + self.learned.len()) as u64
    }

    fn equals(&self, other: &dyn Batch) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(index: u64, ids: &[u32], learned: &[bool], images: usize) -> ChatSample {
        let pixel_values = (0..images * 8).map(|value| value as f32 + index as f32).collect();
        ChatSample {
            index,
            input_ids: ids.into(),
            learned: learned.into(),
            pixel_values,
            image_grids: vec![[1, 2, 2]; images],
        }
    }

    #[test]
    fn chats_come_apart_as_they_were_put_together_and_answers_are_predicted_from_the_token_before() {
        let samples = [
            sample(7, &[1, 2, 3, 4], &[false, false, true, true], 1),
            sample(3, &[5, 6], &[true, true], 0),
            sample(9, &[8, 9, 1], &[false, true, false], 2),
        ];
        let batch = ChatBatch::of(Step(2), &samples.iter().collect::<Vec<_>>(), 0);
        assert_eq!((batch.cells(), batch.tokens(), batch.seq_len), (12, 9, 4));
        assert_eq!(batch.apart(), samples);
        // The first token of the second chat is predicted from nothing.
        let targets = Targets { rows: vec![1, 2, 4, 8], ids: vec![3, 4, 6, 9] };
        assert_eq!(batch.targets(), targets);
        let none = ChatBatch::of(Step(0), &[], 0);
        assert!(none.apart().is_empty() && none.targets() == Targets::default());
    }
}
