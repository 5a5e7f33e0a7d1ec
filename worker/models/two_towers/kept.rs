//! Kept features of a model whose vision tower has streams: of each sample its hidden states, or the merger's
//! output, and behind them the image rows of each stream that is still to be added.
//!
//! ```text
//! sample 0: [rows | stream k | stream k + 1 ..]   sample 1: [rows | stream k | ..]   ..
//! ```
//!
//! In a pass every part is one tensor of all samples. Here the one is made of the other.

/// Rows that each sample has: of hidden states or of the merger's output, and of each stream.
#[derive(Clone, Debug)]
pub struct SampleRows(Vec<[usize; 2]>);

impl SampleRows {
    /// Rows of samples with so many own rows and so many rows of images.
    pub fn new(own: impl IntoIterator<Item = usize>, images: impl IntoIterator<Item = usize>) -> Self {
        Self(own.into_iter().zip(images).map(|(own, images)| [own, images]).collect())
    }

    /// The parts of kept `values`, rows of `width`: own rows, then each of so many streams.
    pub fn apart(&self, values: &[f32], streams: usize, width: usize) -> Vec<Vec<f32>> {
        let mut parts = vec![Vec::new(); 1 + streams];
        let mut rest = values;
        for &[own, images] in &self.0 {
            for (number, part) in parts.iter_mut().enumerate() {
                let rows = if number == 0 { own } else { images };
                let (values, others) = rest.split_at(rows * width);
                part.extend_from_slice(values);
                rest = others;
            }
        }
        parts
    }

    /// The values to be kept, of such parts.
    pub fn together(&self, parts: &[Vec<f32>], width: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(parts.iter().map(Vec::len).sum());
        let mut at = vec![0; parts.len()];
        for &[own, images] in &self.0 {
            for (number, (part, at)) in parts.iter().zip(&mut at).enumerate() {
                let end = *at + if number == 0 { own } else { images } * width;
                values.extend_from_slice(&part[*at..end]);
                *at = end;
            }
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_lies_sample_by_sample_and_comes_apart_as_it_was() {
        let rows = SampleRows::new([2, 1], [1, 0]);
        let parts = [vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], vec![7.0, 8.0], vec![9.0, 10.0]];
        let kept = rows.together(&parts, 2);
        assert_eq!(kept, [1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0, 10.0, 5.0, 6.0]);
        assert_eq!(rows.apart(&kept, 2, 2), parts);
        let alone = rows.together(&parts[..1], 2);
        assert_eq!((&alone, rows.apart(&alone, 0, 2)), (&parts[0], vec![parts[0].clone()]));
    }
}
