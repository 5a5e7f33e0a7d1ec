//! A SigLIP tower, one linear behind it, and the decoder layers of a language model: sizes, tensors, and the
//! model on a device. Families read `config.json` into it.
//!
//! ```text
//! token = W [squares of r x r patches of the tower's features, row by row] (+ b)
//! ```

use std::path::Path;

use burn::tensor::{DType, Int, Tensor, TensorData};
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{BaseWeight, ParamId, ParamScope, Trainables},
};

use super::{
    family::{JointFamily, JointFamilyOn},
    model::JointModel,
    outline::{JointOutline, NamedShape},
    siglip::{SiglipSizes, SiglipTower},
    stream::{LayerKind, StreamLayer, StreamShape},
};
use crate::pretrained::{
    error::ModelError, family::ModelTypes, fields::Fields, loader::Loader, location::FileLocation,
    pictures::PatchShape,
};

/// What models of a family have in common beyond their sizes, paths behind `model.`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JointStyle {
    /// Where the tower is.
    pub tower: &'static str,
    /// Where the linear behind it is.
    pub connector: &'static str,
    /// Whether that has a bias.
    pub bias: bool,
    /// Where the language model is.
    pub text: &'static str,
    /// Kind of the language model's layers. Embeddings of Gemma's tokens are those of the table times the
    /// root of their width.
    pub kind: LayerKind,
    /// Whether its head is the table.
    pub tied: bool,
}

/// `config.json` of a model, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerDecoderSizes {
    /// A decoder layer.
    pub layer: StreamShape,
    /// How many the whole model has.
    pub layers: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// The id that stands for a token of an image.
    pub image_token: u32,
    /// The tower.
    pub vision: SiglipSizes,
    /// Side of the square of patches that becomes one token.
    pub shuffle: usize,
    /// What the family's models have in common.
    pub style: JointStyle,
}

impl TowerDecoderSizes {
    /// What a policy knows of such a model, which lies in its file.
    pub fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError> {
        let layers = within.layers.unwrap_or(self.layers);
        if layers > self.layers {
            let problem = format!(
                "{}, but the policy has {layers} layers; use the model that the policy was made from",
                self.layers
            );
            let path = dir.join("config.json");
            return Err(ModelError::Config { path, field: "text_config.num_hidden_layers".into(), problem });
        }
        Ok(JointOutline {
            layer: self.layer,
            layers,
            vocab_size: self.vocab_size,
            image_token: self.image_token,
            image_side: self.vision.side,
            patches: PatchShape { patch: self.vision.patch, merge: self.shuffle, frames: 1 },
            tensors: self.tensors(within.prefix, layers),
            modules: Vec::new(),
        })
    }

    /// Every tensor of Transformers' class with so many decoder layers.
    fn tensors(&self, prefix: &str, layers: usize) -> Vec<NamedShape> {
        let (d, JointStyle { tower, connector, bias, text, tied, .. }) = (self.layer.width, self.style);
        let at = format!("{prefix}model");
        let mut list = self.vision.tensors(&format!("{at}.{tower}"));
        let [joined, _] = self.joined();
        list.push((format!("{at}.{connector}.weight"), vec![d, joined]));
        list.extend(bias.then(|| (format!("{at}.{connector}.bias"), vec![d])));
        list.push((format!("{at}.{text}.embed_tokens.weight"), vec![self.vocab_size, d]));
        list.extend((0..layers).flat_map(|layer| self.layer.tensors(&format!("{at}.{text}.layers.{layer}"))));
        list.push((format!("{at}.{text}.norm.weight"), vec![d]));
        list.extend((!tied).then(|| (format!("{prefix}lm_head.weight"), vec![self.vocab_size, d])));
        list
    }

    /// Features of the linear behind the tower, `[inputs, outputs]`.
    fn joined(&self) -> [usize; 2] {
        [self.vision.width * self.shuffle * self.shuffle, self.layer.width]
    }
}

/// The fields `text_config` and `vision_config`.
pub fn sections<'f>(root: &Fields<'f>) -> Result<[Fields<'f>; 2], ModelError> {
    let section = |name| {
        root.object(name)?.ok_or_else(|| root.error(name, "missing; use the checkpoint's own config.json"))
    };
    Ok([section("text_config")?, section("vision_config")?])
}

/// The token's id that one of these fields has; `otherwise` if none has it.
pub fn image_token(root: &Fields<'_>, fields: &[&str], otherwise: u32) -> Result<u32, ModelError> {
    for field in fields {
        if let Some(id) = root.uint(field)? {
            let refused = |_| root.error(field, format!("{id}; expected a token id below 2^32"));
            return u32::try_from(id).map_err(refused);
        }
    }
    Ok(otherwise)
}

/// Sizes of decoder layers without biases, with heads of `head_dim` values where the file says nothing, or
/// of as many as fill the width.
pub fn decoder_layer(
    text: &Fields<'_>,
    model_type: &str,
    head_dim: Option<usize>,
) -> Result<StreamShape, ModelError> {
    text.expect_str("model_type", model_type)?;
    for bias in ["attention_bias", "mlp_bias"] {
        if text.bool(bias)? == Some(true) {
            return Err(text.error(bias, "true; layers with biases are not supported"));
        }
    }
    let (width, heads) = (text.size("hidden_size")?, text.size("num_attention_heads")?);
    let kv_heads = text.uint("num_key_value_heads")?.unwrap_or(heads);
    text.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
    let stated = text.uint("head_dim")?.filter(|size| *size > 0);
    let head_dim = stated.or(head_dim).unwrap_or(width / heads);
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(text.error("head_dim", format!("{head_dim}; RoPE needs an even width above 0")));
    }
    let (inner, eps) = (text.size("intermediate_size")?, text.positive("rms_norm_eps")?.unwrap_or(1e-6));
    Ok(StreamShape { width, heads, kv_heads, head_dim, inner, kv_inputs: width, eps })
}

/// A family of such models.
#[derive(Clone, Copy, Debug)]
pub struct TowerDecoderFamily {
    /// Values of `model_type`.
    pub model_types: &'static [&'static str],
    /// What the `config.json` of a directory says.
    pub read: fn(&Path) -> Result<TowerDecoderSizes, ModelError>,
}

impl ModelTypes for TowerDecoderFamily {
    fn model_types(&self) -> &'static [&'static str] {
        self.model_types
    }
}

impl JointFamily for TowerDecoderFamily {
    fn outline(&self, dir: &Path, within: FileLocation<'_>) -> Result<JointOutline, ModelError> {
        (self.read)(dir)?.outline(dir, within)
    }
}

impl<B: Tape<Base = B>> JointFamilyOn<B> for TowerDecoderFamily {
    fn load(
        &self,
        dir: &Path,
        within: FileLocation<'_>,
        loader: &mut Loader<'_, B>,
    ) -> Result<Box<dyn JointModel<B>>, ModelError> {
        let sizes = (self.read)(dir)?;
        let outline = sizes.outline(dir, within)?;
        Ok(Box::new(TowerDecoder::load(sizes, outline, within.prefix, loader)?))
    }
}

/// Such a model, without its LM head.
struct TowerDecoder<B: ModelBackend> {
    outline: JointOutline,
    sizes: TowerDecoderSizes,
    tower: SiglipTower<B>,
    connector: LoraLinear<B>,
    table_vd: BaseWeight<B, 2>,
    layers: Vec<StreamLayer<B>>,
}

impl<B: ModelBackend> TowerDecoder<B> {
    /// Loads what lies behind `prefix`.
    fn load(
        sizes: TowerDecoderSizes,
        outline: JointOutline,
        prefix: &str,
        loader: &mut Loader<'_, B>,
    ) -> Result<Self, ModelError> {
        let (at, JointStyle { tower, connector, bias, text, kind, tied }) =
            (format!("{prefix}model"), sizes.style);
        let tower = SiglipTower::load(sizes.vision.clone(), &format!("{at}.{tower}"), loader)?;
        let connector = loader.linear(&format!("{at}.{connector}"), sizes.joined(), bias)?;
        let mut table = format!("{at}.{text}.embed_tokens.weight");
        let head = format!("{prefix}lm_head.weight");
        // Files have a tensor that is both under either name; where both are there, the table's is read.
        if tied && !loader.checkpoint.contains(&table) && loader.checkpoint.contains(&head) {
            table = head;
        }
        let shape = [sizes.vocab_size, sizes.layer.width];
        let table_vd = match loader.trained_table(&table, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => loader.matrix(&table, shape)?.into(),
        };
        let layer =
            |number| StreamLayer::load(loader, &format!("{at}.{text}.layers.{number}"), sizes.layer, kind);
        let layers = (0..outline.layers).map(layer).collect::<Result<_, _>>()?;
        Ok(Self { outline, sizes, tower, connector, table_vd, layers })
    }

    /// Squares of patches as one row each, their patches row by row.
    fn shuffled(&self, x_nd: Tensor<B, 2>, images: usize) -> Tensor<B, 2> {
        let (r, d) = (self.sizes.shuffle, self.sizes.vision.width);
        let n = self.sizes.vision.patches() / r;
        let squares = x_nd.reshape([images, n, r, n, r, d]).permute([0, 1, 3, 2, 4, 5]);
        squares.reshape([images * n * n, r * r * d])
    }
}

impl<B: Tape<Base = B>> JointModel<B> for TowerDecoder<B> {
    fn outline(&self) -> &JointOutline {
        &self.outline
    }

    fn tower(&self, trainables: &Trainables<B>, patches_pi: Tensor<B, 2>) -> Tensor<B, 2> {
        let side = self.sizes.vision.patches();
        let images = patches_pi.dims()[0] / (side * side);
        let features_nd = self.tower.run(&ParamScope::<B>::frozen(trainables), patches_pi);
        if self.sizes.shuffle == 1 { features_nd } else { self.shuffled(features_nd, images) }
    }

    fn connector(&self) -> &LoraLinear<B> {
        &self.connector
    }

    fn token_embeddings(&self, trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2> {
        let table_vd = self.table_vd.on_tape(&ParamScope::<B>::frozen(trainables));
        let (ids, count): (Vec<i32>, _) = (ids.iter().map(|&id| id as i32).collect(), ids.len());
        let ids: Tensor<B, 1, Int> = Tensor::from_data(TensorData::new(ids, [count]), &table_vd.device());
        let rows_nd = table_vd.select(0, ids);
        let rows_nd = if rows_nd.dtype() == DType::F32 { rows_nd } else { rows_nd.cast(DType::F32) };
        match self.sizes.style.kind {
            LayerKind::Llama => rows_nd,
            LayerKind::Gemma => rows_nd * (self.outline.layer.width as f32).sqrt(),
        }
    }

    fn trained_table(&self) -> Option<ParamId> {
        self.table_vd.trained()
    }

    fn layers(&self) -> &[StreamLayer<B>] {
        &self.layers
    }
}
