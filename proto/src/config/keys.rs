//! Which keys exist, found by asking serde itself, and which of them a misspelled one may have meant.

use serde::{
    Deserialize,
    de::{self, IntoDeserializer, Visitor, value},
};

/// The dotted path of every key of a type, in the order of its declaration; sections themselves are not
/// listed.
pub(super) fn known_keys<T: for<'de> Deserialize<'de>>() -> Vec<String> {
    probed::<T>().keys
}

/// The known keys that are numbers, or lists of a fixed number of them.
pub(super) fn number_keys<T: for<'de> Deserialize<'de>>() -> Vec<String> {
    probed::<T>().numbers
}

fn probed<T: for<'de> Deserialize<'de>>() -> ProbedKeys {
    let mut found = ProbedKeys::default();
    // Types whose values the probe cannot guess are listed as far as it got.
    let _ = T::deserialize(Probe { path: String::new(), found: &mut found });
    found
}

/// Keys that a probe has come by.
#[derive(Default)]
struct ProbedKeys {
    keys: Vec<String>,
    numbers: Vec<String>,
}

/// Help for an unknown `key` below `section`, whose keys are `fields`: the same key elsewhere, a near miss
/// here, or what there is.
pub(super) fn suggestion(section: &str, key: &str, fields: &[&str], known: &[String]) -> String {
    let last = |path: &&String| path.rsplit('.').next().is_some_and(|name| name == key);
    let within = |path: &&String| path.split('.').any(|part| part == key);
    if let Some(path) = known.iter().find(last).or_else(|| known.iter().find(within)) {
        return format!("did you mean `{path}`?");
    }
    let is_or_holds = |path: &String, ours: &str| {
        path.strip_prefix(ours).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    if let Some(ours) = of_other_trainers(key).filter(|ours| known.iter().any(|path| is_or_holds(path, ours)))
    {
        return format!("did you mean `{ours}`?");
    }
    if let Some(near) = closest(key, fields.iter().copied()) {
        return format!("did you mean `{}`?", join(section, near));
    }
    let names = fields.iter().map(|f| format!("`{f}`")).collect::<Vec<_>>().join(", ");
    match section {
        "" => format!("the sections are {names}"),
        _ => format!("keys of `{section}` are {names}"),
    }
}

/// What PEFT, LeRobot and Transformers' `TrainingArguments` call by another name, and what people give
/// without its section.
pub fn of_other_trainers(key: &str) -> Option<&'static str> {
    Some(match key {
        "learning_rate" | "lr" => "optimizer.lr",
        "batch_size" | "train_batch_size" | "global_batch" => "train.global_batch",
        "micro_batch" => "train.micro_batch",
        "per_device_train_batch_size" | "micro_batch_size" | "per_device_batch_size" => "train.micro_batch",
        "gradient_accumulation_steps" => "train.global_batch",
        "nproc_per_node" => "launch.nproc_per_node",
        "max_steps" | "num_steps" | "steps" => "train.steps",
        "num_train_epochs" | "num_epochs" | "epochs" => "train.epochs",
        "save_steps" | "save_freq" => "train.checkpoint_every",
        "save_total_limit" => "train.keep_checkpoints",
        "logging_steps" | "log_freq" => "train.log_every",
        "gradient_checkpointing" => "train.recompute",
        "max_grad_norm" | "grad_clip_norm" => "optimizer.clip_norm",
        "lr_scheduler_type" => "optimizer.schedule",
        "eval_steps" | "eval_freq" => "eval.every",
        "num_workers" | "dataloader_num_workers" => "data.threads",
        "model_name_or_path" | "pretrained_model_name_or_path" | "pretrained_path" => "model.path",
        "repo_id" | "dataset_path" => "data.path",
        "chunk_size" => "data.horizon",
        "r" | "lora_r" | "lora_rank" => "lora.rank",
        "lora_alpha" => "lora.alpha",
        "lora_dropout" => "lora.dropout",
        _ => return None,
    })
}

/// The name of a type of numbers that people abbreviate.
pub(super) fn abbreviated(given: &str) -> Option<&'static str> {
    Some(match given.to_lowercase().as_str() {
        "bf16" | "torch.bfloat16" => "bfloat16",
        "fp16" | "f16" | "half" | "torch.float16" => "float16",
        "fp32" | "f32" | "float" | "torch.float32" => "float32",
        "4bit" | "int4" | "fp4" => "nf4",
        "8bit" => "int8",
        _ => return None,
    })
}

/// The candidate that `given` is probably a misspelling of.
pub(super) fn closest<'a>(given: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Jaro-Winkler favours a common beginning, as abbreviations and typing errors have; 0.8 keeps `lroa` ->
    // `lora` and refuses `steps` -> `state`.
    candidates
        .map(|name| (strsim::jaro_winkler(&given.to_lowercase(), name), name))
        .filter(|(likeness, _)| *likeness >= 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// The dotted path of `key` in `section`.
pub(super) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// A deserializer that offers every struct every one of its fields, and notes the paths of those that are not
/// structs.
struct Probe<'f> {
    path: String,
    found: &'f mut ProbedKeys,
}

macro_rules! answer {
    ($($method:ident $visit:ident $value:expr),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
            self.found.keys.push(self.path);
            visitor.$visit($value)
        }
    )*};
}

macro_rules! answer_number {
    ($($method:ident $visit:ident $value:expr),* $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
            self.found.numbers.push(self.path.clone());
            self.found.keys.push(self.path);
            visitor.$visit($value)
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Probe<'_> {
    type Error = value::Error;

    answer! {
        deserialize_any visit_str "",
        deserialize_str visit_str "",
        deserialize_string visit_str "",
        deserialize_char visit_char 'x',
        deserialize_bool visit_bool true,
        deserialize_bytes visit_bytes &[],
        deserialize_byte_buf visit_bytes &[],
        deserialize_unit visit_str "",
        deserialize_identifier visit_str "",
        deserialize_ignored_any visit_str "",
        deserialize_seq visit_seq value::SeqDeserializer::new(std::iter::empty::<f64>()),
        deserialize_map visit_map value::MapDeserializer::new(std::iter::empty::<(f64, f64)>()),
    }

    answer_number! {
        deserialize_u8 visit_u8 1,
        deserialize_u16 visit_u16 1,
        deserialize_u32 visit_u32 1,
        deserialize_u64 visit_u64 1,
        deserialize_i8 visit_i8 1,
        deserialize_i16 visit_i16 1,
        deserialize_i32 visit_i32 1,
        deserialize_i64 visit_i64 1,
        deserialize_f32 visit_f32 1.0,
        deserialize_f64 visit_f64 1.0,
    }

    /// A value that may be written in several ways is to be read in the simplest.
    fn is_human_readable(&self) -> bool {
        false
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, value::Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, value::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, value::Error> {
        visitor.visit_unit()
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, value::Error> {
        self.found.numbers.push(self.path.clone());
        self.found.keys.push(self.path);
        visitor.visit_seq(value::SeqDeserializer::new(std::iter::repeat_n(1.0, len)))
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, value::Error> {
        self.deserialize_tuple(len, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, value::Error> {
        visitor.visit_map(Fields { path: self.path, fields: fields.iter(), current: "", found: self.found })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, value::Error> {
        self.found.keys.push(self.path);
        visitor.visit_enum(variants[0].into_deserializer())
    }
}

struct Fields<'f> {
    path: String,
    fields: std::slice::Iter<'static, &'static str>,
    current: &'static str,
    found: &'f mut ProbedKeys,
}

impl<'de> de::MapAccess<'de> for Fields<'_> {
    type Error = value::Error;

    fn next_key_seed<K: de::DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, value::Error> {
        let Some(field) = self.fields.next() else { return Ok(None) };
        self.current = field;
        seed.deserialize(value::StrDeserializer::new(field)).map(Some)
    }

    fn next_value_seed<T: de::DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, value::Error> {
        seed.deserialize(Probe { path: join(&self.path, self.current), found: self.found })
    }
}
