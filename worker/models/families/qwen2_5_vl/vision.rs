//! The vision tower: patches to tokens of the language model's width.
//!
//! ```text
//! embed    pixels to [patches, d], in window order
//! blocks   attention within windows, or within whole frames in `fullatt_block_indexes`
//! merge    squares of patches to tokens [tokens, out], back in raster order
//! ```

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{
    config::{QwenConfig, VisionConfig},
    windows::WindowPlan,
};
use crate::{
    pretrained::{
        error::{ModelError, TokenError},
        loader::{LinearShape, Loader},
        pictures::ImageShape,
        stack::{Assemble, Manifest, Parts, Stack},
    },
    two_towers::{
        gated_mlp::{GatedMlp, normed},
        model::TwoTowers,
        rope::RotaryTables,
        vision::{MergerPlace, VisionStem, VisionTower},
    },
};
use coxswain_nn::{
    bfloat16::narrow,
    block::Block,
    kernels::{AttentionMask, ModelBackend, Tape},
    lora::{LoraLinear, forward_all},
    params::{BaseWeight, Keep, ParamScope},
};

/// A model of the family.
pub type QwenVl<B> = TwoTowers<B, WindowTower<B>>;

/// Epsilon of every norm of the tower; not configurable in Transformers either.
const NORM_EPS: f64 = 1e-6;

/// What all vision blocks share within one micro-batch.
#[derive(Clone)]
pub struct VisionContext<B: ModelBackend> {
    /// Order, windows and positions of the patches.
    pub plan: WindowPlan,
    /// Rotary tables in window order, `[1, patches, k]`.
    pub tables: RotaryTables<B>,
    /// Attention within windows.
    pub window_mask: AttentionMask,
    /// Attention within frames.
    pub frame_mask: AttentionMask,
    /// Place in window order of each token in raster order, `[tokens]`.
    places: Vec<i32>,
}

impl<B: ModelBackend> VisionContext<B> {
    /// The context of images of these grids, `(t, h, w)` in patches.
    pub fn new(config: &VisionConfig, grids: &[[u32; 3]], device: &B::Device) -> Result<Self, TokenError> {
        let plan = WindowPlan::new(config, grids)?;
        let places: Vec<i32> = plan.places().into_iter().map(|place| place as i32).collect();
        let positions: Vec<_> = plan.positions_in_windows(config.merge_unit()).collect();
        Ok(Self {
            tables: RotaryTables::axial(config.head_dim, config.rope_theta, &positions, device),
            window_mask: plan.window_mask(),
            frame_mask: plan.frame_mask(),
            places,
            plan,
        })
    }

    /// See [`VisionStem::patches`]. What `embedding` would round on a GPU is rounded before it goes there.
    fn patches(
        &self,
        config: &VisionConfig,
        pixel_values: &[&[f32]],
        embedding: &LoraLinear<B>,
        device: &B::Device,
    ) -> Result<Tensor<B, 2>, TokenError> {
        let (patches, width) = (self.plan.patches(), config.patch_values());
        let halves = B::rounds(device) && embedding.rounds_input() == Some(DType::BF16);
        let dtype = if halves { DType::BF16 } else { DType::F32 };
        // Where nothing is computed, nothing is read.
        if !B::VALUES {
            return Ok(Tensor::zeros([patches, width], (device, dtype)));
        }
        let found = pixel_values.iter().map(|piece| piece.len()).sum();
        if found != patches * width {
            return Err(TokenError::Pixels { found, patches, width });
        }
        let (shape, unit) = ([patches, width], config.merge_unit());
        let data = match halves {
            true => TensorData::new(self.plan.permute(pixel_values, width, unit, narrow), shape),
            false => TensorData::new(self.plan.permute(pixel_values, width, unit, |value| value), shape),
        };
        Ok(B::bring(data, device).reshape(shape))
    }
}

/// The patch embedding and the blocks.
pub struct WindowStem<B: ModelBackend> {
    config: VisionConfig,
    blocks: Stack<B, VisionBlock<B>>,
    patch_embed: LoraLinear<B>,
    device: B::Device,
}

impl<B: ModelBackend> VisionStem<B> for WindowStem<B> {
    type Sizes = VisionConfig;
    type Block = VisionBlock<B>;

    fn cut(config: &VisionConfig, depth: usize) -> VisionConfig {
        VisionConfig { depth: depth.min(config.depth), ..config.clone() }
    }

    fn load(loader: &mut Loader<'_, B>, config: &VisionConfig) -> Result<Self, ModelError> {
        let (d, side) = (config.hidden_size, config.patch_size);
        let kernel = [d, config.in_channels, config.temporal_patch_size, side, side];
        let weight = loader.convolution("model.visual.patch_embed.proj.weight", &kernel)?;
        Ok(Self {
            patch_embed: LoraLinear::new(weight, None, None),
            blocks: Stack::load(loader, config, config.depth)?,
            config: config.clone(),
            device: loader.device.clone(),
        })
    }

    fn sizes(&self) -> &VisionConfig {
        &self.config
    }

    fn context(&self, grids: &[ImageShape]) -> Result<VisionContext<B>, TokenError> {
        VisionContext::new(&self.config, grids, &self.device)
    }

    fn positions(&self, grid: ImageShape) -> Result<Vec<[u32; 2]>, TokenError> {
        let plan = WindowPlan::new(&self.config, &[grid])?;
        Ok(plan.positions_in_windows(self.config.merge_unit()).collect())
    }

    fn patches(
        &self,
        pixel_values: &[&[f32]],
        context: &VisionContext<B>,
    ) -> Result<Tensor<B, 2>, TokenError> {
        context.patches(&self.config, pixel_values, &self.patch_embed, &self.device)
    }

    fn embed<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_pi: Tensor<T, 2>,
        _context: &VisionContext<B>,
    ) -> Tensor<T, 2> {
        self.patch_embed.forward(params, x_pi)
    }

    fn embed_trains(&self) -> bool {
        self.patch_embed.trains()
    }

    fn blocks(&self) -> &Stack<B, VisionBlock<B>> {
        &self.blocks
    }
}

/// The vision tower.
pub struct WindowTower<B: ModelBackend> {
    stem: WindowStem<B>,
    merger_norm_d: BaseWeight<B, 1>,
    merger_in: LoraLinear<B>,
    merger_out: LoraLinear<B>,
}

impl<B: ModelBackend> VisionTower<B> for WindowTower<B> {
    type Stem = WindowStem<B>;
    type Config = QwenConfig;

    fn load(loader: &mut Loader<'_, B>, config: &VisionConfig) -> Result<Self, ModelError> {
        let (d, merged) = (config.hidden_size, config.hidden_size * config.merge_unit());
        Ok(Self {
            stem: WindowStem::load(loader, config)?,
            merger_norm_d: loader.gain("model.visual.merger.ln_q.weight", d)?,
            merger_in: loader.linear("model.visual.merger.mlp.0", [merged, merged], true)?,
            merger_out: loader.linear("model.visual.merger.mlp.2", [merged, config.out_hidden_size], true)?,
        })
    }

    fn stem(&self) -> &WindowStem<B> {
        &self.stem
    }

    fn merge<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_pd: Tensor<T, 2>,
        _place: MergerPlace,
        context: &VisionContext<B>,
    ) -> Tensor<T, 2> {
        let [patches, d] = x_pd.dims();
        let unit = self.stem.config.merge_unit();
        let y_pd = T::rms_norm(x_pd, self.merger_norm_d.on_tape(params), NORM_EPS);
        let y_ni = self.merger_in.forward(params, y_pd.reshape([patches / unit, unit * d]));
        let y_nd = self.merger_out.forward(params, T::gelu_erf(y_ni));
        let places = TensorData::new(context.places.clone(), [context.places.len()]);
        let places: Tensor<T, 1, Int> = Tensor::from_data(places, &y_nd.device());
        y_nd.select(0, places)
    }

    fn merger_trains(&self, _place: MergerPlace) -> bool {
        self.merger_in.trains() || self.merger_out.trains() || self.merger_norm_d.trains()
    }
}

/// One vision block.
pub struct VisionBlock<B: ModelBackend> {
    heads: usize,
    head_dim: usize,
    full_attention: bool,
    attention_norm_d: BaseWeight<B, 1>,
    qkv: LoraLinear<B>,
    proj: LoraLinear<B>,
    mlp_norm_d: BaseWeight<B, 1>,
    mlp: GatedMlp<B>,
}

impl<B: ModelBackend> Assemble<B> for VisionBlock<B> {
    type Sizes = VisionConfig;

    fn manifest(config: &VisionConfig, index: usize) -> Manifest {
        let (at, d) = (format!("model.visual.blocks.{index}"), config.hidden_size);
        let attention = [
            LinearShape::new(&at, "attn.qkv", [d, 3 * d], true),
            LinearShape::new(&at, "attn.proj", [d, d], true),
        ];
        let mlp = LinearShape::gated_mlp(&at, [d, config.intermediate_size], true);
        Manifest {
            norms: ["norm1", "norm2"].map(|norm| (format!("{at}.{norm}.weight"), d)).into(),
            linears: attention.into_iter().chain(mlp).collect(),
            groups: std::iter::once(2..4).collect(),
        }
    }

    fn assemble(config: &VisionConfig, index: usize, parts: Parts<B>) -> Self {
        let Parts { mut norms, mut linears } = parts;
        let [attention_norm_d, mlp_norm_d] = [norms.take(), norms.take()];
        Self {
            heads: config.num_heads,
            head_dim: config.head_dim,
            full_attention: config.full_attention_blocks.contains(&index),
            attention_norm_d,
            qkv: linears.take(),
            proj: linears.take(),
            mlp_norm_d,
            mlp: GatedMlp::assemble(&mut linears),
        }
    }
}

impl<B: ModelBackend> Block<B> for VisionBlock<B> {
    type Context = VisionContext<B>;

    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &VisionContext<B>,
    ) -> Tensor<T, 2> {
        let [n, d] = x_nd.dims();
        let (h, k) = (self.heads, self.head_dim);
        let gain_d = self.attention_norm_d.on_tape(params);
        let y_nd = normed(&x_nd, gain_d, NORM_EPS, self.qkv.rounds_input());
        let [qkv] = forward_all(params, [(&self.qkv, Keep::Output)], y_nd);
        let part = |number: usize| qkv.clone().narrow(1, number * d, d).reshape([1, n, h, k]);
        let (inputs_bshk, scale) = ([part(0), part(1), part(2)], (k as f64).powf(-0.5));
        let mask = if self.full_attention { &context.frame_mask } else { &context.window_mask };
        let heads_bshk = T::rope_attention(inputs_bshk, context.tables.lifted(), mask, scale);
        self.proj.forward_residual(params, x_nd, heads_bshk.reshape([n, d]))
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        _context: &VisionContext<B>,
    ) -> Tensor<T, 2> {
        let y_nd = normed(&x_nd, self.mlp_norm_d.on_tape(params), NORM_EPS, self.mlp.rounds_input());
        self.mlp.forward_residual(params, x_nd, y_nd)
    }

    fn trains(&self) -> bool {
        let norms = [&self.attention_norm_d, &self.mlp_norm_d].into_iter().any(BaseWeight::trains);
        norms || self.qkv.trains() || self.proj.trains() || self.mlp.trains()
    }
}
