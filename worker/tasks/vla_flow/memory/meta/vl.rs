//! Vision tower and language model, with sizes in place of tensors: the counterpart of `model::policy::vl`
//! and `model::qwen`.

use coxswain_proto::run_spec::Recompute;

use super::{
    ops::{AttentionShape, Heads, Keep, Linear},
    tape::{Matrix, Tape, Value},
    tower::{Ground, Input, Layer, Recorded, Tower, Trace},
};

/// A block of either tower.
#[derive(Clone, Debug)]
pub(in crate::vla_flow::memory) struct BlockShape {
    /// Bytes of its frozen weights where they are in memory only while it runs, or is next; 0 where they are
    /// held.
    pub streamed: u64,
    /// Query heads.
    pub heads: u64,
    /// Keys that one query sees at most.
    pub keys: u64,
    /// Query, key and value, or all three in one.
    pub projections: Projections,
    /// Attention's output.
    pub output: Linear,
    /// Gate and up.
    pub gate: Linear,
    /// See `gate`.
    pub up: Linear,
    /// Down.
    pub down: Linear,
}

/// How queries, keys and values are made.
#[derive(Clone, Debug)]
pub(in crate::vla_flow::memory) enum Projections {
    /// Three linears: query, key, value.
    Apart([Linear; 3]),
    /// One linear, cut in three.
    Together(Linear),
}

/// What a pass begins with: the counterpart of `model::policy`'s entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::memory) enum Entry {
    /// Pixels.
    Pixels,
    /// Kept image features.
    Images,
    /// The kept input of a decoder layer.
    Layer(usize),
    /// Kept hidden states.
    Hidden,
}

/// Both towers on one micro-batch.
#[derive(Clone, Debug)]
pub(in crate::vla_flow::memory) struct VlShape {
    /// Where it begins.
    pub entry: Entry,
    /// Patches of all images.
    pub patches: u64,
    /// Values of one patch.
    pub patch_values: u64,
    /// Width of a vision head.
    pub vision_head: u64,
    /// Patch embedding.
    pub embed: Linear,
    /// Vision blocks.
    pub vision: Vec<BlockShape>,
    /// Both linears of the merger.
    pub merger: [Linear; 2],
    /// Patches of a token.
    pub merge_unit: u64,
    /// Tokens, padding included.
    pub tokens: u64,
    /// Width of the language model.
    pub width: u64,
    /// Width of its heads.
    pub head: u64,
    /// Decoder layers.
    pub text: Vec<BlockShape>,
    /// Whether the embedding table is kept as bf16.
    pub narrow_table: bool,
}

impl Layer for BlockShape {
    fn attention(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix {
        let x = inputs[0].clone();
        let y = tape.norm(&x);
        let shape = AttentionShape { heads: self.heads, keys: self.keys };
        let out = match &self.projections {
            Projections::Apart([query, key, value]) => {
                let q = tape.noted(Keep::Output, &y, *query);
                let k = tape.noted(Keep::Output, &y, *key);
                let value = tape.noted_of(Keep::Output, y, *value);
                let query = tape.rotary(q);
                let key = tape.rotary(k);
                tape.attention(Heads { query, key, value }, shape)
            }
            Projections::Together(linear) => {
                let qkv = tape.noted_of(Keep::Output, y, *linear);
                let third = |tape: &Tape| tape.copied_part(&qkv, x.rows, x.cols);
                let query = tape.rotary(third(tape));
                let key = tape.rotary(third(tape));
                let out = tape.attention(Heads { query, key, value: third(tape) }, shape);
                let sum = tape.residual(&x, tape.noted_of(Keep::Last, out, self.output));
                drop(qkv);
                return sum;
            }
        };
        let out = tape.noted_of(Keep::Last, out, self.output);
        tape.residual(&x, out)
    }

    fn mlp(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix {
        let x = inputs[0].clone();
        let y = tape.norm(&x);
        let gate = tape.noted(Keep::Output, &y, self.gate);
        let up = tape.noted_of(Keep::Never, y, self.up);
        let down = tape.noted_of(Keep::Last, tape.swiglu(gate, up), self.down);
        tape.residual(&x, down)
    }

    fn streamed(&self) -> u64 {
        self.streamed
    }

    fn trains(&self) -> bool {
        let attention = match &self.projections {
            Projections::Apart(linears) => linears.iter().any(Linear::trains),
            Projections::Together(linear) => linear.trains(),
        };
        attention || [self.output, self.gate, self.up, self.down].iter().any(Linear::trains)
    }
}

/// What a forward pass keeps, the context's tables included.
pub(super) struct VlTrace {
    vision: Option<(Trace, Recorded)>,
    text: Option<(Trace, Recorded)>,
    _tables: Vec<Matrix>,
}

impl VlTrace {
    /// Whether the gradient of the hidden states is wanted.
    pub fn trains(&self) -> bool {
        self.text.is_some()
    }
}

/// The towers of one micro-batch under a recompute mode.
pub(super) struct VlRun<'a> {
    pub ground: &'a Ground,
    pub shape: &'a VlShape,
    pub mode: Recompute,
}

impl VlRun<'_> {
    /// The hidden states, and what is kept.
    pub fn forward(&self) -> (Matrix, VlTrace) {
        let (shape, tape) = (self.shape, self.ground.plain());
        if shape.entry == Entry::Hidden {
            let hidden = tape.matrix(shape.tokens, shape.width);
            return (hidden, VlTrace { vision: None, text: None, _tables: Vec::new() });
        }
        let mut tables = vec![tape.matrix(shape.tokens, 2 * shape.head)];
        let (first, x, vision) = match shape.entry {
            Entry::Layer(first) => (first, tape.matrix(shape.tokens, shape.width), None),
            entry => {
                let (features, vision) = match entry {
                    Entry::Pixels => {
                        tables.push(tape.matrix(shape.patches, 2 * shape.vision_head));
                        self.vision(&tape)
                    }
                    _ => (Some(tape.matrix(self.image_tokens(), shape.width)), None),
                };
                // A bf16 table's rows are selected as they are, then widened.
                let narrow =
                    shape.narrow_table.then(|| self.ground.heap.take(2 * shape.tokens * shape.width));
                let rows = tape.matrix(shape.tokens, shape.width);
                drop(narrow);
                (0, self.scatter(&tape, rows, features), vision)
            }
        };
        let below = vision.is_some();
        let (x, layers) = self.text_tower(first).forward(x, below);
        let trains = below || shape.text[first..].iter().any(Layer::trains);
        let (hidden, text) = match trains {
            true => {
                let input = Input { value: x, tracked: true };
                let norm = self.ground.record(vec![input], |tape, inputs| tape.norm(&inputs[0]));
                (norm.output(), Some((layers, norm)))
            }
            false => (tape.norm(&x), None),
        };
        (hidden, VlTrace { vision, text, _tables: tables })
    }

    /// Carries the gradient of the hidden states back.
    pub fn backward(&self, trace: VlTrace, dhidden: Value) {
        let VlTrace { vision, text, _tables } = trace;
        let Some((layers, norm)) = text else { return };
        let Some(dx) = norm.backward(dhidden).into_iter().next().flatten() else { return };
        let first = if let Entry::Layer(first) = self.shape.entry { first } else { 0 };
        let (dx, _) = self.text_tower(first).backward(layers, dx);
        let (Some((blocks, merger)), Some(dx)) = (vision, dx) else { return };
        let dfeatures =
            self.ground.heap.take(self.ground.widths.each * self.image_tokens() * self.shape.width);
        let dpatches = merger.backward(dfeatures).into_iter().next().flatten();
        if let Some(dpatches) = dpatches {
            self.vision_tower().backward(blocks, dpatches);
        }
        drop(dx);
    }

    fn vision(&self, tape: &Tape) -> (Option<Matrix>, Option<(Trace, Recorded)>) {
        let shape = self.shape;
        if shape.patches == 0 {
            return (None, None);
        }
        let pixels = tape.matrix(shape.patches, shape.patch_values);
        let x = tape.linear_of(pixels, shape.embed);
        let (x, blocks) = self.vision_tower().forward(x, false);
        let blocks_train = shape.vision.iter().any(Layer::trains);
        if !blocks_train && !shape.merger.iter().any(Linear::trains) {
            return (Some(self.merge(tape, x)), None);
        }
        let input = Input { value: x, tracked: blocks_train };
        let merger = self.ground.record(vec![input], |tape, inputs| self.merge(tape, inputs[0].clone()));
        (Some(merger.output()), Some((blocks, merger)))
    }

    fn merge(&self, tape: &Tape, x: Matrix) -> Matrix {
        let unit = self.shape.merge_unit;
        let y = tape.norm(&x);
        drop(x);
        let (rows, cols) = (y.rows / unit, y.cols * unit);
        let y = tape.linear_of(y.reshaped(rows, cols), self.shape.merger[0]);
        let y = tape.linear_of(tape.pointwise(y), self.shape.merger[1]);
        tape.copied_part(&y, y.rows, y.cols)
    }

    /// The embeddings with their image rows replaced: both laid end to end, then selected from.
    fn scatter(&self, tape: &Tape, rows: Matrix, features: Option<Matrix>) -> Matrix {
        let Some(features) = features else { return rows };
        let joined = tape.matrix(rows.rows + features.rows, rows.cols);
        drop((rows, features));
        tape.copied_part(&joined, self.shape.tokens, self.shape.width)
    }

    fn image_tokens(&self) -> u64 {
        self.shape.patches / self.shape.merge_unit
    }

    fn vision_tower(&self) -> Tower<'_, BlockShape> {
        self.tower(&self.shape.vision)
    }

    fn text_tower(&self, first: usize) -> Tower<'_, BlockShape> {
        self.tower(&self.shape.text[first..])
    }

    fn tower(&self, layers: &[BlockShape]) -> Tower<'_, BlockShape> {
        Tower { ground: self.ground, layers: layers.to_vec(), mode: self.mode, sides: Vec::new() }
    }
}
