//! SigLIP's vision tower (arXiv 2303.15343), which several families have before their connectors.
//!
//! ```text
//! x = W_patch p + b + position                                  patches in raster order
//! x = x + W_o attention(layer_norm(x));  x = x + W_2 gelu_tanh(W_1 layer_norm(x))      all with biases
//! features = layer_norm(x)
//! ```
//!
//! It does not train.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{AttentionMask, AttentionOps, ModelBackend, RowOps, Tape},
    lora::LoraLinear,
    memory,
    params::{BaseWeight, ParamScope},
};

use super::outline::NamedShape;
use crate::pretrained::{error::ModelError, loader::Loader};

/// Sizes of a tower.
#[derive(Clone, Debug, PartialEq)]
pub struct SiglipSizes {
    /// Model width.
    pub width: usize,
    /// Blocks.
    pub depth: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of the MLP.
    pub inner: usize,
    /// Side of an image in pixels.
    pub side: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Added to the variance in norms.
    pub eps: f64,
}

impl SiglipSizes {
    /// Patches along a side.
    pub fn patches(&self) -> usize {
        self.side / self.patch
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        3 * self.patch * self.patch
    }

    /// The tower's tensors at this path, in Transformers' order.
    pub fn tensors(&self, at: &str) -> Vec<NamedShape> {
        let Self { width, depth, inner, patch, .. } = *self;
        let patches = self.patches() * self.patches();
        let mut list = Vec::new();
        let mut add = |name: &str, shape: &[usize]| list.push((format!("{at}.{name}"), shape.to_vec()));
        add("embeddings.patch_embedding.weight", &[width, 3, patch, patch]);
        add("embeddings.patch_embedding.bias", &[width]);
        add("embeddings.position_embedding.weight", &[patches, width]);
        for block in 0..depth {
            let at = format!("encoder.layers.{block}");
            let square = ["q_proj", "k_proj", "v_proj", "out_proj"]
                .map(|name| (format!("self_attn.{name}"), [width, width]));
            let mlp = [("mlp.fc1".into(), [inner, width]), ("mlp.fc2".into(), [width, inner])];
            for (name, shape) in square.into_iter().chain(mlp) {
                add(&format!("{at}.{name}.weight"), &shape);
                add(&format!("{at}.{name}.bias"), &shape[..1]);
            }
            for norm in ["layer_norm1", "layer_norm2"] {
                ["weight", "bias"].iter().for_each(|part| add(&format!("{at}.{norm}.{part}"), &[width]));
            }
        }
        ["weight", "bias"].iter().for_each(|part| add(&format!("post_layernorm.{part}"), &[width]));
        list
    }
}

/// The tower.
pub struct SiglipTower<B: ModelBackend> {
    /// The tower's sizes.
    pub sizes: SiglipSizes,
    patch_embedding: LoraLinear<B>,
    /// `[patches, d]`.
    positions_pd: Tensor<B, 2>,
    blocks: Vec<Block<B>>,
    last_norm: TowerNorm<B>,
}

struct Block<B: ModelBackend> {
    norms: [TowerNorm<B>; 2],
    qkv: [LoraLinear<B>; 3],
    output: LoraLinear<B>,
    mlp: [LoraLinear<B>; 2],
}

struct TowerNorm<B: ModelBackend> {
    gain_d: Tensor<B, 1>,
    bias_d: Tensor<B, 1>,
    eps: f64,
}

impl<B: ModelBackend> TowerNorm<B> {
    fn load(loader: &Loader<'_, B>, at: &str, width: usize, eps: f64) -> Result<Self, ModelError> {
        let [gain_d, bias_d] = ["weight", "bias"].map(|part| loader.vector(&format!("{at}.{part}"), width));
        Ok(Self { gain_d: gain_d?, bias_d: bias_d?, eps })
    }

    fn run(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let row = |x_d: &Tensor<B, 1>| x_d.clone().unsqueeze::<2>();
        <B as RowOps>::layer_norm(x_nd, self.eps) * row(&self.gain_d) + row(&self.bias_d)
    }
}

impl<B: ModelBackend> SiglipTower<B> {
    /// Loads what lies at this path.
    pub fn load(sizes: SiglipSizes, tower: &str, loader: &mut Loader<'_, B>) -> Result<Self, ModelError> {
        let SiglipSizes { width, depth, patch, eps, .. } = sizes;
        let kernel = format!("{tower}.embeddings.patch_embedding");
        // A convolution whose stride is its kernel is a linear map of the flattened patch.
        let weight = loader.flattened(
            &format!("{kernel}.weight"),
            &[width, 3, patch, patch],
            [width, sizes.patch_values()],
        )?;
        let bias: BaseWeight<B, 1> = loader.vector(&format!("{kernel}.bias"), width)?.into();
        let positions = format!("{tower}.embeddings.position_embedding.weight");
        let count = sizes.patches() * sizes.patches();
        Ok(Self {
            patch_embedding: LoraLinear::new(BaseWeight::from(weight), Some(bias), None),
            positions_pd: loader.matrix(&positions, [count, width])?,
            blocks: (0..depth)
                .map(|number| Block::load(loader, &format!("{tower}.encoder.layers.{number}"), &sizes))
                .collect::<Result<_, _>>()?,
            last_norm: TowerNorm::load(loader, &format!("{tower}.post_layernorm"), width, eps)?,
            sizes,
        })
    }
}

impl<B: Tape<Base = B>> SiglipTower<B> {
    /// `[images * patches, values]` to `[images * patches, d]`.
    pub fn run(&self, params: &ParamScope<'_, B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2> {
        let (side, width) = (self.sizes.patches(), self.sizes.width);
        let images = patches_pi.dims()[0] / (side * side);
        let x_nd = self.patch_embedding.forward(params, patches_pi).reshape([images, side * side, width]);
        let positions_pd = self.positions_pd.clone().cast(x_nd.dtype());
        let x_nd = (x_nd + positions_pd.unsqueeze::<3>()).reshape([images * side * side, width]);
        let x_nd = self.blocks.iter().fold(x_nd, |x_nd, block| {
            memory::check();
            block.run(params, x_nd, images, &self.sizes)
        });
        self.last_norm.run(x_nd)
    }
}

impl<B: ModelBackend> Block<B> {
    fn load(loader: &mut Loader<'_, B>, at: &str, sizes: &SiglipSizes) -> Result<Self, ModelError> {
        let SiglipSizes { width, inner, eps, .. } = *sizes;
        let norms = ["layer_norm1", "layer_norm2"]
            .map(|name| TowerNorm::load(loader, &format!("{at}.{name}"), width, eps));
        let [first, second] = norms;
        let mut linear = |name: &str, features| loader.linear(&format!("{at}.{name}"), features, true);
        let square = [width, width];
        Ok(Self {
            norms: [first?, second?],
            qkv: [
                linear("self_attn.q_proj", square)?,
                linear("self_attn.k_proj", square)?,
                linear("self_attn.v_proj", square)?,
            ],
            output: linear("self_attn.out_proj", square)?,
            mlp: [linear("mlp.fc1", [width, inner])?, linear("mlp.fc2", [inner, width])?],
        })
    }
}

impl<B: Tape<Base = B>> Block<B> {
    fn run(
        &self,
        params: &ParamScope<'_, B>,
        x_nd: Tensor<B, 2>,
        images: usize,
        sizes: &SiglipSizes,
    ) -> Tensor<B, 2> {
        let [n, d] = x_nd.dims();
        let head_dim = d / sizes.heads;
        let y_nd = self.norms[0].run(x_nd.clone());
        let [q, k, v] = self.qkv.each_ref().map(|linear| {
            linear.forward(params, y_nd.clone()).reshape([images, n / images.max(1), sizes.heads, head_dim])
        });
        let scale = (head_dim as f64).powf(-0.5);
        let heads = <B as AttentionOps>::attention(q, k, v, &AttentionMask::Full, scale);
        let x_nd = self.output.forward_residual(params, x_nd, heads.reshape([n, d]));
        let [first, second] = &self.mlp;
        let inner_nf = B::gelu_tanh(first.forward(params, self.norms[1].run(x_nd.clone())));
        second.forward_residual(params, x_nd, inner_nf)
    }
}
