//! Attention of tokens that are cut into segments which do not see each other: neighbours of one length
//! become a batch of their own, so what lies between two segments is never computed.

use burn::tensor::{Tensor, backend::Backend};

use super::{
    AttentionMask, AttentionOutput, AttentionSaved,
    blockwise::{Scores, joined},
};

/// Attention by `dense`, which attends under masks without segments and leaves `lse`: of all batch rows, or
/// of each run of segments.
pub fn attention<B: Scores>(
    inputs_bshk: [Tensor<B, 4>; 3],
    mask: &AttentionMask,
    dense: impl Fn([Tensor<B, 4>; 3], &AttentionMask) -> AttentionOutput<B>,
) -> AttentionOutput<B> {
    let Some(ends) = mask.segments() else { return dense(inputs_bshk, mask) };
    let parts = runs(ends).into_iter().map(|run| {
        let part = dense(inputs_bshk.each_ref().map(|x_bshk| run.cut(x_bshk)), &run.mask(mask));
        let lse_bsh = part.lse();
        (run.join(part.out_bshk), run.join_rows(lse_bsh))
    });
    let (outs, lses): (Vec<_>, Vec<_>) = parts.unzip();
    AttentionOutput { out_bshk: joined(outs), lse_bsh: Some(joined(lses)) }
}

/// The gradients of queries, keys and values by `dense`, likewise.
pub fn gradients<B: Scores>(
    saved: AttentionSaved<B>,
    mask: &AttentionMask,
    dout_bshk: Tensor<B, 4>,
    dense: impl Fn(AttentionSaved<B>, &AttentionMask, Tensor<B, 4>) -> [Tensor<B, 4>; 3],
) -> [Tensor<B, 4>; 3] {
    let Some(ends) = mask.segments() else { return dense(saved, mask, dout_bshk) };
    let mut parts: [Vec<Tensor<B, 4>>; 3] = [Vec::new(), Vec::new(), Vec::new()];
    for run in runs(ends) {
        let gradients = dense(run.saved(&saved), &run.mask(mask), run.cut(&dout_bshk));
        parts.iter_mut().zip(gradients).for_each(|(parts, part)| parts.push(run.join(part)));
    }
    parts.map(joined)
}

/// Consecutive segments of one length.
#[derive(Debug, PartialEq, Eq)]
struct SegmentRun {
    start: usize,
    segments: usize,
    len: usize,
}

/// `[0, e1, e2, ..]` as runs; empty segments vanish.
fn runs(ends: &[u32]) -> Vec<SegmentRun> {
    let mut runs: Vec<SegmentRun> = Vec::new();
    for pair in ends.windows(2) {
        let (start, len) = (pair[0] as usize, (pair[1] - pair[0]) as usize);
        match runs.last_mut() {
            Some(run) if run.len == len => run.segments += 1,
            _ if len == 0 => {}
            _ => runs.push(SegmentRun { start, segments: 1, len }),
        }
    }
    runs
}

impl SegmentRun {
    /// What queries of a segment see of it.
    fn mask(&self, of_all: &AttentionMask) -> AttentionMask {
        match of_all {
            AttentionMask::CausalSegments(_) => {
                AttentionMask::Causal(std::iter::repeat_n(0..self.len as u32, self.segments).collect())
            }
            _ => AttentionMask::Full,
        }
    }

    /// The run's part of one batch row, a batch row for each segment.
    fn cut<B: Scores>(&self, x_1shk: &Tensor<B, 4>) -> Tensor<B, 4> {
        B::by_segment(x_1shk.clone(), self.start, [self.segments, self.len])
    }

    fn saved<B: Scores>(&self, saved: &AttentionSaved<B>) -> AttentionSaved<B> {
        let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
        let [q_bshk, k_bshk, v_bshk, out_bshk] =
            [q_bshk, k_bshk, v_bshk, &output.out_bshk].map(|x| self.cut(x));
        let lse_bsh = Some(self.cut_rows(output.lse()));
        AttentionSaved { q_bshk, k_bshk, v_bshk, output: AttentionOutput { out_bshk, lse_bsh } }
    }

    fn cut_rows<B: Backend>(&self, x_1sh: Tensor<B, 3>) -> Tensor<B, 3> {
        let heads = x_1sh.dims()[2];
        let x_1sh = x_1sh.narrow(1, self.start, self.segments * self.len);
        x_1sh.reshape([self.segments, self.len, heads])
    }

    fn join<B: Backend>(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [_, _, heads, dim] = x.dims();
        x.reshape([1, self.segments * self.len, heads, dim])
    }

    fn join_rows<B: Backend>(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let heads = x.dims()[2];
        x.reshape([1, self.segments * self.len, heads])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_gather_segments_of_one_length() {
        let run = |start, segments, len| SegmentRun { start, segments, len };
        assert_eq!(runs(&[0, 4, 8, 12]), [run(0, 3, 4)]);
        assert_eq!(runs(&[0, 4, 4, 8, 10]), [run(0, 2, 4), run(8, 1, 2)]);
    }
}
