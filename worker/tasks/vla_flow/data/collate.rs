//! Samples side by side: a micro-batch, padded on the left to its longest prompt; and apart again. Pixels are
//! shared, so that what is read ahead is never there twice.

use std::borrow::Borrow;

use coxswain_proto::ids::Step;

use super::batch::{MicroBatch, Sample};

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
        pixel_values: samples().map(|s| s.pixel_values.clone()).collect(),
        image_shapes: Vec::with_capacity(total(|s| s.image_shapes.len())),
        images_per_row: samples().map(|s| s.image_shapes.len() as u32).collect(),
        state: Vec::with_capacity(total(|s| s.state.len())),
        sensor: Vec::with_capacity(total(|s| s.sensor.len())),
        actions: Vec::with_capacity(total(|s| s.actions.len())),
        action_widths: samples().map(|s| s.action_width).collect(),
        action_valid: Vec::with_capacity(total(|s| s.action_is_pad.len())),
        features: None,
    };
    for sample in samples() {
        let padding = seq_len - sample.input_ids.len();
        batch.input_ids.extend(std::iter::repeat_n(pad, padding));
        batch.input_ids.extend_from_slice(&sample.input_ids);
        batch.valid.push(padding as u32..seq_len as u32);
        batch.image_shapes.extend_from_slice(&sample.image_shapes);
        batch.state.extend_from_slice(&sample.state);
        batch.sensor.extend_from_slice(&sample.sensor);
        batch.actions.extend_from_slice(&sample.actions);
        batch.action_valid.extend(sample.action_is_pad.iter().map(|pad| f32::from(u8::from(!pad))));
    }
    batch
}

/// The samples of a micro-batch, without padding: what [`collate`] was given, but for their episodes and
/// frames, which a micro-batch does not have.
pub fn take_apart(batch: &MicroBatch) -> Vec<Sample> {
    let rows = batch.len();
    let own = |values: &[f32], row: usize| {
        let each = values.len() / rows;
        values[row * each..][..each].to_vec()
    };
    let mut grids = &batch.image_shapes[..];
    let mut sample = |row: usize| {
        let (image_shapes, others) = grids.split_at(batch.images_per_row[row] as usize);
        grids = others;
        let valid = &batch.valid[row];
        let ids = &batch.input_ids[row * batch.seq_len..][valid.start as usize..valid.end as usize];
        Sample {
            index: batch.sample_indices[row],
            input_ids: ids.to_vec(),
            pixel_values: batch.pixel_values.get(row).cloned().unwrap_or_default(),
            image_shapes: image_shapes.to_vec(),
            state: own(&batch.state, row),
            sensor: own(&batch.sensor, row),
            actions: own(&batch.actions, row),
            action_width: batch.action_widths[row],
            action_is_pad: own(&batch.action_valid, row).into_iter().map(|valid| valid == 0.0).collect(),
            ..Sample::default()
        }
    };
    (0..rows).map(&mut sample).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(index: u64, ids: &[u32], pad: &[bool]) -> Sample {
        Sample {
            index,
            episode: 0,
            frame: index,
            input_ids: ids.into(),
            pixel_values: vec![index as f32; 2].into(),
            image_shapes: vec![[1, 2, 2]],
            state: vec![1.0],
            sensor: Vec::new(),
            actions: vec![0.5; pad.len()],
            action_width: 1,
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
        assert_eq!(batch.pixel_values, samples.each_ref().map(|sample| sample.pixel_values.clone()));
        assert_eq!(batch.action_valid, [1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn no_samples_make_an_empty_batch() {
        let none: [Sample; 0] = [];
        assert!(collate(Step(0), &none, 0).is_empty());
        assert!(take_apart(&collate(Step(0), &none, 0)).is_empty());
    }

    /// Samples that differ in everything in which samples of one data set can; with pixels, or none where
    /// features are kept.
    fn samples() -> impl Strategy<Value = Vec<Sample>> {
        let grid = (1..3u32, 1..4u32, 1..4u32).prop_map(|(t, h, w)| [t, h, w]);
        let ids = proptest::collection::vec(0..9u32, 1..12);
        let row = (ids, proptest::collection::vec(grid, 0..3), proptest::collection::vec(any::<bool>(), 4));
        (proptest::collection::vec(row, 1..9), any::<bool>()).prop_map(|(rows, seen)| {
            let one =
                |(at, (input_ids, image_shapes, action_is_pad)): (usize, (Vec<u32>, Vec<[u32; 3]>, _))| {
                    let values = |len: usize| (0..len).map(|n| (at * 1000 + n) as f32).collect::<Vec<_>>();
                    let pixels = if seen { 3 * image_shapes.len() } else { 0 };
                    Sample {
                        index: at as u64 * 7,
                        episode: 0,
                        frame: 0,
                        input_ids,
                        pixel_values: values(pixels).into(),
                        image_shapes,
                        state: values(2),
                        sensor: values(if seen { 6 } else { 0 }),
                        actions: values(8),
                        action_width: 1 + at % 2,
                        action_is_pad,
                    }
                };
            rows.into_iter().enumerate().map(one).collect()
        })
    }

    proptest! {
        #[test]
        fn what_is_put_side_by_side_comes_apart_as_it_was(samples in samples()) {
            prop_assert_eq!(take_apart(&collate(Step(1), &samples, 3)), samples);
        }
    }
}
