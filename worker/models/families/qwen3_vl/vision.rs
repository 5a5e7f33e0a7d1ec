//! The vision tower: patches to tokens of the language model's width, and streams on the way.
//!
//! ```text
//! embed    pixels to [patches, d], plus learned positions
//! blocks   attention within whole frames
//! merge    squares of patches to tokens [tokens, out]; behind some blocks as well, for streams
//! ```
//!
//! Patches run in the order in which preprocessing makes them: merged squares in raster order.

use burn::tensor::{DType, Int, Tensor, TensorData};
use coxswain_nn::{
    bfloat16::narrow,
    block::Block,
    kernels::{AttentionMask, ModelBackend, Tape},
    lora::{LoraLinear, forward_all},
    params::{BaseWeight, Keep, ParamScope},
};

use super::{
    config::{DeepStackConfig, Qwen3VlConfig},
    merger::{LayerNorm, Merger},
    positions::ResampledPositions,
};
use crate::{
    pretrained::{
        error::{ModelError, TokenError},
        loader::{LinearShape, Loader},
        pictures::ImageShape,
        stack::{Assemble, Manifest, Parts, Stack},
    },
    two_towers::{
        grid,
        model::TwoTowers,
        rope::RotaryTables,
        vision::{MergerPlace, VisionStem, VisionTower},
    },
};

/// A model of the family.
pub type Qwen3VlModel<B> = TwoTowers<B, DeepStackTower<B>>;

/// What all vision blocks share within one micro-batch.
#[derive(Clone)]
pub struct DeepStackContext<B: ModelBackend> {
    learned: ResampledPositions,
    /// Rotary tables, `[1, patches, k]`.
    tables: RotaryTables<B>,
    /// Attention within frames.
    mask: AttentionMask,
    patches: usize,
}

/// The patch embedding and the blocks.
pub struct DeepStackStem<B: ModelBackend> {
    config: DeepStackConfig,
    patch_embed: LoraLinear<B>,
    /// Learned positions, `[side * side, d]`.
    positions_ed: BaseWeight<B, 2>,
    blocks: Stack<B, DeepStackBlock<B>>,
    device: B::Device,
}

impl<B: ModelBackend> VisionStem<B> for DeepStackStem<B> {
    type Sizes = DeepStackConfig;
    type Block = DeepStackBlock<B>;

    fn cut(config: &DeepStackConfig, depth: usize) -> DeepStackConfig {
        DeepStackConfig { depth: depth.min(config.depth), ..config.clone() }
    }

    fn load(loader: &mut Loader<'_, B>, config: &DeepStackConfig) -> Result<Self, ModelError> {
        let (d, side) = (config.hidden_size, config.patch_size);
        let kernel = [d, config.in_channels, config.temporal_patch_size, side, side];
        let weight = loader.convolution("model.visual.patch_embed.proj.weight", &kernel)?;
        let bias = loader.gain("model.visual.patch_embed.proj.bias", d)?;
        let (name, shape) = ("model.visual.pos_embed.weight", [config.position_side.pow(2), d]);
        let positions_ed = match loader.trained_table(name, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => loader.matrix(name, shape)?.into(),
        };
        Ok(Self {
            patch_embed: LoraLinear::new(weight, Some(bias), None),
            positions_ed,
            blocks: Stack::load(loader, config, config.depth)?,
            config: config.clone(),
            device: loader.device.clone(),
        })
    }

    fn sizes(&self) -> &DeepStackConfig {
        &self.config
    }

    fn context(&self, grids: &[ImageShape]) -> Result<DeepStackContext<B>, TokenError> {
        let DeepStackConfig { spatial_merge_size: merge, position_side, head_dim, rope_theta, .. } =
            self.config;
        grid::check(grids, merge)?;
        let (mut learned, mut ends, mut positions) = (ResampledPositions::default(), vec![0], Vec::new());
        for &image @ [t, h, w] in grids {
            let frame: Vec<_> = grid::positions([h, w], merge).collect();
            for _ in 0..t {
                learned.add(position_side, image, &frame);
                positions.extend_from_slice(&frame);
                ends.push(positions.len() as u32);
            }
        }
        Ok(DeepStackContext {
            learned,
            tables: RotaryTables::axial(head_dim, rope_theta, &positions, &self.device),
            mask: AttentionMask::Segments(ends.into()),
            patches: positions.len(),
        })
    }

    fn positions(&self, grid: ImageShape) -> Result<Vec<[u32; 2]>, TokenError> {
        let merge = self.config.spatial_merge_size;
        grid::check(&[grid], merge)?;
        let [t, h, w] = grid;
        Ok((0..t).flat_map(|_| grid::positions([h, w], merge)).collect())
    }

    fn patches(
        &self,
        pixel_values: &[&[f32]],
        context: &DeepStackContext<B>,
    ) -> Result<Tensor<B, 2>, TokenError> {
        let (patches, width, device) = (context.patches, self.config.patch_values(), &self.device);
        // What the embedding would round on a GPU is rounded before it goes there.
        let halves = B::rounds(device) && self.patch_embed.rounds_input() == Some(DType::BF16);
        let dtype = if halves { DType::BF16 } else { DType::F32 };
        // Where nothing is computed, nothing is read.
        if !B::VALUES {
            return Ok(Tensor::zeros([patches, width], (device, dtype)));
        }
        let found = pixel_values.iter().map(|piece| piece.len()).sum();
        if found != patches * width {
            return Err(TokenError::Pixels { found, patches, width });
        }
        let (shape, values) = ([patches, width], pixel_values.iter().copied().flatten().copied());
        let data = match halves {
            true => TensorData::new(values.map(narrow).collect::<Vec<_>>(), shape),
            false => TensorData::new(pixel_values.concat(), shape),
        };
        Ok(B::bring(data, device).reshape(shape))
    }

    fn embed<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_pi: Tensor<T, 2>,
        context: &DeepStackContext<B>,
    ) -> Tensor<T, 2> {
        self.patch_embed.forward(params, x_pi) + self.learned_positions(params, &context.learned)
    }

    fn embed_trains(&self) -> bool {
        self.patch_embed.trains() || self.positions_ed.trains()
    }

    fn blocks(&self) -> &Stack<B, DeepStackBlock<B>> {
        &self.blocks
    }
}

impl<B: ModelBackend> DeepStackStem<B> {
    /// Learned positions of patches, `[patches, d]`, in float32.
    fn learned_positions<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        at: &ResampledPositions,
    ) -> Tensor<T, 2> {
        let (table_ed, patches) = (self.positions_ed.on_tape(params), at.entries[0].len());
        let device = table_ed.device();
        let neighbour = |(entries, shares): (&Vec<i32>, &Vec<f32>)| {
            let entries = TensorData::new(entries.clone(), [patches]);
            let entries: Tensor<T, 1, Int> = Tensor::from_data(entries, &device);
            let shares = TensorData::new(shares.clone(), [patches, 1]);
            let shares_p1: Tensor<T, 2> = Tensor::from_data(shares, (&device, DType::F32));
            let rows_pd = table_ed.clone().select(0, entries);
            let rows_pd = if rows_pd.dtype() == DType::F32 { rows_pd } else { rows_pd.cast(DType::F32) };
            rows_pd * shares_p1
        };
        let [first_pd, second_pd, third_pd, fourth_pd] =
            [0, 1, 2, 3].map(|number| neighbour((&at.entries[number], &at.shares[number])));
        first_pd + second_pd + third_pd + fourth_pd
    }
}

/// The vision tower.
pub struct DeepStackTower<B: ModelBackend> {
    stem: DeepStackStem<B>,
    merger: Merger<B>,
    /// Mergers of the streams.
    streams: Vec<Merger<B>>,
}

impl<B: ModelBackend> DeepStackTower<B> {
    fn merger(&self, place: MergerPlace) -> &Merger<B> {
        match place {
            MergerPlace::Stream(number) => &self.streams[number],
            MergerPlace::Last => &self.merger,
        }
    }
}

impl<B: ModelBackend> VisionTower<B> for DeepStackTower<B> {
    type Stem = DeepStackStem<B>;
    type Config = Qwen3VlConfig;

    fn load(loader: &mut Loader<'_, B>, config: &DeepStackConfig) -> Result<Self, ModelError> {
        let stem = DeepStackStem::load(loader, config)?;
        let merger = Merger::load(loader, config, "model.visual.merger", true)?;
        let of_stream = |number| {
            Merger::load(loader, config, &format!("model.visual.deepstack_merger_list.{number}"), false)
        };
        let streams = (0..config.deepstack_blocks.len()).map(of_stream).collect::<Result<_, _>>()?;
        Ok(Self { stem, merger, streams })
    }

    fn stem(&self) -> &DeepStackStem<B> {
        &self.stem
    }

    fn leaves_behind(&self) -> &[usize] {
        &self.stem.config.deepstack_blocks
    }

    fn merge<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_pd: Tensor<T, 2>,
        place: MergerPlace,
        _context: &DeepStackContext<B>,
    ) -> Tensor<T, 2> {
        self.merger(place).forward(params, x_pd)
    }

    fn merger_trains(&self, place: MergerPlace) -> bool {
        self.merger(place).trains()
    }
}

/// One vision block.
pub struct DeepStackBlock<B: ModelBackend> {
    heads: usize,
    head_dim: usize,
    attention_norm: LayerNorm<B>,
    qkv: LoraLinear<B>,
    proj: LoraLinear<B>,
    mlp_norm: LayerNorm<B>,
    fc1: LoraLinear<B>,
    fc2: LoraLinear<B>,
}

impl<B: ModelBackend> Assemble<B> for DeepStackBlock<B> {
    type Sizes = DeepStackConfig;

    fn manifest(config: &DeepStackConfig, index: usize) -> Manifest {
        let at = format!("model.visual.blocks.{index}");
        let (d, f) = (config.hidden_size, config.intermediate_size);
        let norms = ["norm1", "norm2"].map(|norm| LayerNorm::<B>::tensors(&format!("{at}.{norm}"), d));
        Manifest {
            norms: norms.into_iter().flatten().collect(),
            linears: vec![
                LinearShape::new(&at, "attn.qkv", [d, 3 * d], true),
                LinearShape::new(&at, "attn.proj", [d, d], true),
                LinearShape::new(&at, "mlp.linear_fc1", [d, f], true),
                LinearShape::new(&at, "mlp.linear_fc2", [f, d], true),
            ],
            groups: vec![],
        }
    }

    fn assemble(config: &DeepStackConfig, _index: usize, parts: Parts<B>) -> Self {
        let Parts { mut norms, mut linears } = parts;
        Self {
            heads: config.num_heads,
            head_dim: config.head_dim,
            attention_norm: LayerNorm::assemble(&mut norms),
            qkv: linears.take(),
            proj: linears.take(),
            mlp_norm: LayerNorm::assemble(&mut norms),
            fc1: linears.take(),
            fc2: linears.take(),
        }
    }
}

impl<B: ModelBackend> Block<B> for DeepStackBlock<B> {
    type Context = DeepStackContext<B>;

    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &DeepStackContext<B>,
    ) -> Tensor<T, 2> {
        let [n, d] = x_nd.dims();
        let (h, k) = (self.heads, self.head_dim);
        let y_nd = self.attention_norm.forward(params, x_nd.clone());
        let [qkv] = forward_all(params, [(&self.qkv, Keep::Output)], y_nd);
        let part = |number: usize| qkv.clone().narrow(1, number * d, d).reshape([1, n, h, k]);
        let (inputs_bshk, scale) = ([part(0), part(1), part(2)], (k as f64).powf(-0.5));
        let heads_bshk = T::rope_attention(inputs_bshk, context.tables.lifted(), &context.mask, scale);
        self.proj.forward_residual(params, x_nd, heads_bshk.reshape([n, d]))
    }

    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        _context: &DeepStackContext<B>,
    ) -> Tensor<T, 2> {
        let y_nd = self.mlp_norm.forward(params, x_nd.clone());
        let [y_nf] = forward_all(params, [(&self.fc1, Keep::Output)], y_nd);
        self.fc2.forward_residual(params, x_nd, T::gelu_tanh(y_nf))
    }

    fn trains(&self) -> bool {
        let norms = [&self.attention_norm, &self.mlp_norm].into_iter().any(LayerNorm::trains);
        norms || [&self.qkv, &self.proj, &self.fc1, &self.fc2].into_iter().any(LoraLinear::trains)
    }
}
