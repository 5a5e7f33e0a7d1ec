//! Samples side by side: a micro-batch, padded on the left to its longest prompt.

use std::borrow::Borrow;

use coxswain_proto::ids::Step;

use crate::batch::{MicroBatch, Sample};

/// One micro-batch of these samples, in this order.
pub fn collate(step: Step, samples: &[impl Borrow<Sample>], pad: u32) -> MicroBatch {
    let samples = || samples.iter().map(Borrow::borrow);
    let seq_len = samples().map(|s| s.input_ids.len()).max().unwrap_or(0);
    let total = |size: fn(&Sample) -> usize| samples().map(size).sum();
    let mut batch = MicroBatch {
        step,
        sample_indices: samples().map(|s| s.index).collect(),
        input_ids: Vec::with_capacity(samples().len() * seq_len),
        valid: Vec::with_capacity(samples().len()),
        seq_len,
        pixel_values: Vec::with_capacity(total(|s| s.pixel_values.len())),
        image_grids: Vec::with_capacity(total(|s| s.image_grids.len())),
        images_per_row: samples().map(|s| s.image_grids.len() as u32).collect(),
        state: Vec::with_capacity(total(|s| s.state.len())),
        sensor: Vec::with_capacity(total(|s| s.sensor.len())),
        actions: Vec::with_capacity(total(|s| s.actions.len())),
        action_valid: Vec::with_capacity(total(|s| s.action_is_pad.len())),
        features: None,
    };
    for sample in samples() {
        let padding = seq_len - sample.input_ids.len();
        batch.input_ids.extend(std::iter::repeat_n(pad, padding));
        batch.input_ids.extend_from_slice(&sample.input_ids);
        batch.valid.push(padding as u32..seq_len as u32);
        batch.pixel_values.extend_from_slice(&sample.pixel_values);
        batch.image_grids.extend_from_slice(&sample.image_grids);
        batch.state.extend_from_slice(&sample.state);
        batch.sensor.extend_from_slice(&sample.sensor);
        batch.actions.extend_from_slice(&sample.actions);
        batch.action_valid.extend(sample.action_is_pad.iter().map(|pad| f32::from(u8::from(!pad))));
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(index: u64, ids: &[u32], pad: &[bool]) -> Sample {
        Sample {
            index,
            episode: 0,
            frame: index,
            input_ids: ids.into(),
            pixel_values: vec![index as f32; 2],
            image_grids: vec![[1, 2, 2]],
            state: vec![1.0],
            sensor: Vec::new(),
            actions: vec![0.5; pad.len()],
            action_is_pad: pad.into(),
        }
    }

    #[test]
    fn shorter_prompts_are_padded_on_the_left() {
        let samples = [sample(4, &[7, 8, 9], &[false, false]), sample(2, &[5], &[false, true])];
        let batch = collate(Step(3), &samples, 0);
        assert_eq!((batch.len(), batch.seq_len, batch.tokens()), (2, 3, 4));
        assert_eq!(batch.input_ids, [7, 8, 9, 0, 0, 5]);
        assert_eq!(batch.valid, [0..3, 2..3]);
        assert_eq!(batch.sample_indices, [4, 2]);
        assert_eq!(batch.pixel_values, [4.0, 4.0, 2.0, 2.0]);
        assert_eq!(batch.action_valid, [1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn no_samples_make_an_empty_batch() {
        let none: [Sample; 0] = [];
        assert!(collate(Step(0), &none, 0).is_empty());
    }
}
