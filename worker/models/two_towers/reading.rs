//! What families of this shape read alike: fields of their configurations, and names of their tensors.

use crate::pretrained::{
    error::ModelError,
    fields::Fields,
    rules::{Place, Rules},
};

/// What names mean in paths of Transformers 5; `canonical` makes them of names in files. The vision tower is
/// not quantized, nor is the head.
pub const fn rules(canonical: fn(&str) -> String) -> Rules {
    Rules { canonical, place, packs: |module| !of_vision(module) && module != "lm_head" }
}

fn of_vision(name: &str) -> bool {
    name.starts_with("model.visual")
}

fn place(name: &str) -> Place {
    if of_vision(name) {
        return Place::Vision(Place::number(name, "model.visual.blocks."));
    }
    if let Some(layer) = Place::number(name, "model.language_model.layers.") {
        return Place::Layer(layer);
    }
    match name.strip_prefix("model.language_model.").unwrap_or(name).split('.').next() {
        Some("embed_tokens") => Place::Table,
        Some("norm") => Place::FinalNorm,
        Some("lm_head") => Place::Head,
        _ => Place::Other,
    }
}

/// The base of the language model's rotary frequencies, where the file has one, and how many of the `half`
/// that there are turn with each axis; `section` where the file does not say. `kinds` are what is expected.
pub(crate) fn text_rope(
    f: &Fields<'_>,
    half: usize,
    section: [usize; 3],
    kinds: &str,
) -> Result<(Option<f64>, [usize; 3]), ModelError> {
    let (parameters, scaling) = (f.object("rope_parameters")?, f.object("rope_scaling")?);
    if let (Some(new), Some(old)) = (&parameters, &scaling) {
        new.agree(old, &["mrope_section", "rope_theta"])?;
    }
    let (mut theta, mut found) = (f.positive("rope_theta")?, None);
    for rope in [&parameters, &scaling].into_iter().flatten() {
        for field in ["rope_type", "type"] {
            if let Some(kind) = rope.str(field)?
                && !["default", "mrope"].contains(&kind)
            {
                let problem =
                    format!("{kind:?}; expected {kinds}: scaled rotary embeddings are not supported");
                return Err(rope.error(field, problem));
            }
        }
        if let Some(nested) = rope.positive("rope_theta")? {
            if let Some(outer) = theta.filter(|outer| *outer != nested) {
                let problem = format!("{nested}, but rope_theta at the outer level is {outer}");
                return Err(rope.error("rope_theta", problem));
            }
            theta = Some(nested);
        }
        found = found.or(rope.uints("mrope_section")?.map(|values| (rope.clone(), values)));
    }
    let (rope, values) = found.unwrap_or_else(|| (f.clone(), section.to_vec()));
    let section: [usize; 3] = values
        .try_into()
        .map_err(|values| rope.error("mrope_section", format!("{values:?}; expected three numbers")))?;
    if section.iter().sum::<usize>() != half {
        let problem = format!("{section:?} does not sum to half the head width, {half}");
        return Err(rope.error("mrope_section", problem));
    }
    Ok((theta, section))
}

/// Width of the vision tower, its heads, and the width of a head.
pub(crate) fn vision_heads(f: &Fields<'_>) -> Result<[usize; 3], ModelError> {
    let (width, heads) = (f.size("hidden_size")?, f.size("num_heads")?);
    f.divides("num_heads", heads, "hidden_size", width)?;
    let head_dim = width / heads;
    if !head_dim.is_multiple_of(4) {
        let problem = format!("head width {head_dim}; RoPE along two axes needs a width divisible by 4");
        return Err(f.error("num_heads", problem));
    }
    Ok([width, heads, head_dim])
}

/// The base of the vision tower's rotary frequencies.
pub(crate) fn vision_rope(f: &Fields<'_>) -> Result<f64, ModelError> {
    let Some(rope) = f.object("rope_parameters")? else { return Ok(1e4) };
    if let Some(found) = rope.str("rope_type")?
        && found != "axial"
    {
        return Err(rope.error("rope_type", format!("{found:?}; expected \"axial\"")));
    }
    Ok(rope.positive("rope_theta")?.unwrap_or(1e4))
}

/// Refuses a vision tower whose features have another width than the language model.
pub(crate) fn check_widths(vision: &Fields<'_>, out: usize, text: usize) -> Result<(), ModelError> {
    match out == text {
        true => Ok(()),
        false => {
            Err(vision
                .error("out_hidden_size", format!("{out} contradicts the text model's hidden_size {text}")))
        }
    }
}
