//! Blocks of encoder and decoder: each sublayer reads the norm of the stream and is added to it.
//!
//! ```text
//! encoder    x ─ self-attention ─┬─ feed-forward
//! decoder    x ─ self-attention ─ cross attention ─┬─ feed-forward        ┬ where recompute cuts a block
//! ```

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::forward_all,
    params::{BaseWeight, Keep, ParamScope},
    recompute::Layer,
};

use super::{attention::Attention, config::T5Config, context::T5Context, feed_forward::DenseReluDense};
use crate::pretrained::{error::ModelError, loader::Loader};

/// An attention with the norm before it.
pub struct NormedAttention<B: ModelBackend> {
    norm_d: BaseWeight<B, 1>,
    attention: Attention<B>,
}

impl<B: ModelBackend> NormedAttention<B> {
    fn load(loader: &mut Loader<'_, B>, config: &T5Config, at: &str, kind: &str) -> Result<Self, ModelError> {
        let attention = Attention::load(loader, config, &format!("{at}.{kind}"))?;
        let norm_d = loader.gain(&format!("{at}.layer_norm.weight"), config.d_model)?;
        Ok(Self { norm_d, attention })
    }

    fn trains(&self) -> bool {
        self.attention.trains() || self.norm_d.trains()
    }
}

/// One block; of the decoder if it has a cross attention.
pub struct T5Block<B: ModelBackend> {
    own: NormedAttention<B>,
    cross: Option<NormedAttention<B>>,
    feed_norm_d: BaseWeight<B, 1>,
    feed: DenseReluDense<B>,
    eps: f64,
}

impl<B: ModelBackend> T5Block<B> {
    /// Loads block `index` of the `encoder` or the `decoder`.
    pub fn load(
        loader: &mut Loader<'_, B>,
        config: &T5Config,
        stack: &str,
        index: usize,
    ) -> Result<Self, ModelError> {
        let layer = |number: usize| format!("{stack}.block.{index}.layer.{number}");
        let own = NormedAttention::load(loader, config, &layer(0), "SelfAttention")?;
        let cross = (stack == "decoder")
            .then(|| NormedAttention::load(loader, config, &layer(1), "EncDecAttention"))
            .transpose()?;
        let at = layer(1 + usize::from(cross.is_some()));
        let feed = DenseReluDense::load(loader, config, &at)?;
        let feed_norm_d = loader.gain(&format!("{at}.layer_norm.weight"), config.d_model)?;
        Ok(Self { own, cross, feed_norm_d, feed, eps: config.eps })
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.own.trains()
            || self.cross.as_ref().is_some_and(NormedAttention::trains)
            || self.feed_norm_d.trains()
            || self.feed.trains()
    }

    fn normed<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        norm_d: &BaseWeight<B, 1>,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        T::rms_norm(x_nd, norm_d.on_tape(params), self.eps)
    }

    /// What the heads of the block's own attention see of `x`, `[n, heads * width]`.
    fn own_heads<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &T5Context<B>,
    ) -> Tensor<T, 2> {
        let NormedAttention { norm_d, attention } = &self.own;
        let y_nd = self.normed(params, norm_d, x_nd);
        let layers = [&attention.q, &attention.k, &attention.v].map(|layer| (layer, Keep::Output));
        let inputs = forward_all(params, layers, y_nd);
        let added = match &self.cross {
            None => [Some(context.encoder_bias.on_tape(params)), context.against_padding()],
            Some(_) => [Some(context.decoder_bias.on_tape(params)), None],
        };
        attention.attend(context.batch, inputs, added)
    }
}

/// A block in its micro-batch's context: of the encoder, or of the decoder, to which what the encoder has
/// made is a side input.
pub struct InContext<'a, B: ModelBackend> {
    /// The block.
    pub block: &'a T5Block<B>,
    /// The micro-batch's context.
    pub context: &'a T5Context<B>,
    /// Whether the table trains of what is added to its scores.
    pub bias_trains: bool,
}

impl<B: Tape<Base = B>> Layer<B> for InContext<'_, B> {
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let Self { block, context, .. } = *self;
        let x_nd = inputs[0].clone();
        let heads_nd = block.own_heads(params, x_nd.clone(), context);
        let Some(NormedAttention { norm_d, attention }) = &block.cross else {
            return block.own.attention.o.forward_residual(params, x_nd, heads_nd);
        };
        let [seen_nd] = forward_all(params, [(&block.own.attention.o, Keep::Output)], heads_nd);
        let x_nd = x_nd + seen_nd;
        let y_nd = block.normed(params, norm_d, x_nd.clone());
        let [q_nd] = forward_all(params, [(&attention.q, Keep::Output)], y_nd);
        let layers = [&attention.k, &attention.v].map(|layer| (layer, Keep::Output));
        let source = context.dropout.as_ref().map(|rows| &rows.source);
        let [k_nd, v_nd] = params.reading(source, || forward_all(params, layers, inputs[1].clone()));
        let added = [context.against_padding(), None];
        let heads_nd = attention.attend(context.batch, [q_nd, k_nd, v_nd], added);
        attention.o.forward_residual(params, x_nd, heads_nd)
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        inputs: &[Tensor<T, 2>],
    ) -> Tensor<T, 2> {
        let block = self.block;
        let y_nd = block.normed(params, &block.feed_norm_d, inputs[0].clone());
        block.feed.forward_residual(params, inputs[0].clone(), y_nd)
    }

    fn trains(&self) -> bool {
        self.block.trains() || self.bias_trains
    }
}

/// What a block of the decoder keeps while it writes: keys and values, `[b, written, heads * width]` of its
/// own tokens and `[b * s, heads * width]` of what the encoder has made.
pub struct WrittenKeys<B: ModelBackend> {
    own: Option<[Tensor<B, 3>; 2]>,
    cross: Option<[Tensor<B, 2>; 2]>,
}

impl<B: Tape<Base = B>> T5Block<B> {
    /// What is known before the first token: keys and values of what the encoder has made.
    pub fn before_writing(&self, params: &ParamScope<'_, B>, memory: Tensor<B, 2>) -> WrittenKeys<B> {
        let cross = self.cross.as_ref().map(|NormedAttention { attention, .. }| {
            [&attention.k, &attention.v].map(|layer| layer.forward(params, memory.clone()))
        });
        WrittenKeys { own: None, cross }
    }

    /// One more token of every row, `[b, d]`.
    pub fn write(
        &self,
        params: &ParamScope<'_, B>,
        x_bd: Tensor<B, 2>,
        context: &T5Context<B>,
        kept: &mut WrittenKeys<B>,
    ) -> Tensor<B, 2> {
        let b = context.batch;
        let at = kept.own.as_ref().map_or(0, |[keys, _]| keys.dims()[1]);
        let NormedAttention { norm_d, attention } = &self.own;
        let y_bd = self.normed(params, norm_d, x_bd.clone());
        let q_bd = attention.q.forward(params, y_bd.clone());
        let newest = [&attention.k, &attention.v].map(|layer| layer.forward(params, y_bd.clone()));
        let newest = newest.map(|x_bd| {
            let width = x_bd.dims()[1];
            x_bd.reshape([b, 1, width])
        });
        let own = match kept.own.take() {
            None => newest,
            Some(before) => {
                let mut newest = newest.into_iter();
                before.map(|before| Tensor::cat(std::iter::once(before).chain(newest.next()).collect(), 1))
            }
        };
        let [k_nd, v_nd] = own.clone().map(|x_bsd| {
            let [b, s, d] = x_bsd.dims();
            x_bsd.reshape([b * s, d])
        });
        kept.own = Some(own);
        let bias = context.decoder_bias.on_tape(params).narrow(2, at, 1).narrow(3, 0, at + 1);
        let heads_bd = attention.attend(b, [q_bd, k_nd, v_nd], [Some(bias), None]);
        let mut x_bd = attention.o.forward_residual(params, x_bd, heads_bd);
        if let (Some(NormedAttention { norm_d, attention }), Some([k_nd, v_nd])) = (&self.cross, &kept.cross)
        {
            let y_bd = self.normed(params, norm_d, x_bd.clone());
            let inputs = [attention.q.forward(params, y_bd), k_nd.clone(), v_nd.clone()];
            let heads_bd = attention.attend(b, inputs, [context.padding.clone(), None]);
            x_bd = attention.o.forward_residual(params, x_bd, heads_bd);
        }
        let y_bd = self.normed(params, &self.feed_norm_d, x_bd.clone());
        self.feed.forward_residual(params, x_bd, y_bd)
    }
}
