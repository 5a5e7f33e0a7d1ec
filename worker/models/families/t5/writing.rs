//! What the decoder writes by itself, token by token; keys and values of what it has written are kept.
//!
//! A row depends on its own source alone. Rows that have ended go on beside the others, unread.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::Tape,
    params::{ParamScope, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::Recompute;

use super::{block::WrittenKeys, context::T5Context, model::T5, pass::T5Run};
use crate::text_to_text::{Choice, NoToken, Texts};

impl<B: Tape<Base = B>> T5<B> {
    /// Answers to sources `[b, s]`, each up to its end, which it includes, or to `most` tokens.
    pub fn write(
        &self,
        trainables: &Trainables<B>,
        texts: &Texts<'_>,
        most: usize,
        choose: Choice<'_>,
    ) -> Result<Vec<Vec<u32>>, NoToken> {
        // The bias of every length is a part of the longest one's.
        let longest = vec![self.config.special.decoder_start; texts.batch * most];
        let context = T5Context::new(self, trainables, &Texts { target: &longest, ..*texts });
        let retention = Retention::in_float32(Recompute::None);
        let memory = T5Run { model: self, context: &context, trainables, retention }.encode(texts.source);
        let params = ParamScope::<B>::frozen(trainables);
        let blocks = &self.decoder.blocks;
        let mut kept: Vec<WrittenKeys<B>> =
            blocks.iter().map(|block| block.before_writing(&params, memory.clone())).collect();
        let mut answers = vec![Vec::new(); texts.batch];
        let mut last = vec![self.config.special.decoder_start; texts.batch];
        let mut open = texts.batch;
        for at in 0..most {
            if open == 0 {
                break;
            }
            let mut x_bd = self.embed(trainables, &last);
            for (block, kept) in blocks.iter().zip(&mut kept) {
                x_bd = block.write(&params, x_bd, &context, kept);
            }
            let x_bd = B::rms_norm(x_bd, self.decoder.norm_d.on_tape(&params), self.config.eps);
            let logits = self.rows(trainables, x_bd);
            for (row, answer) in answers.iter_mut().enumerate() {
                if answer.last() == Some(&self.config.special.eos) {
                    continue;
                }
                let logits = &logits[row * self.config.vocab_size..][..self.config.vocab_size];
                let id = choose(row, at, logits).ok_or(NoToken { row })?;
                answer.push(id);
                last[row] = id;
                open -= usize::from(id == self.config.special.eos);
            }
        }
        Ok(answers)
    }

    fn rows(&self, trainables: &Trainables<B>, x_bd: Tensor<B, 2>) -> Vec<f32> {
        self.logits(trainables, x_bd).into_data().convert::<f32>().into_vec().expect("converted to f32")
    }
}
