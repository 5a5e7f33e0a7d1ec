//! Names of files in `info.json`: templates with numbers and names in them, as Python's `str.format` fills
//! them.

use std::path::{Component, Path};

/// What stands for a name in a template.
pub(super) enum TemplateValue<'a> {
    Number(u64),
    Text(&'a str),
}

/// The numbers of a file under the names that LeRobot's versions have for them.
pub(super) fn numbered(name: &str, chunk: u64, file: u64) -> Option<TemplateValue<'static>> {
    match name {
        "chunk_index" | "episode_chunk" => Some(TemplateValue::Number(chunk)),
        "file_index" | "episode_index" => Some(TemplateValue::Number(file)),
        _ => None,
    }
}

/// Python's `str.format` for `{name}` and, of numbers, `{name:0Nd}`; `None` for anything else.
pub(super) fn expand<'a>(
    template: &str,
    value: impl Fn(&str) -> Option<TemplateValue<'a>>,
) -> Option<String> {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(open) = rest.find('{') {
        let close = open + rest[open..].find('}')?;
        let (name, format) = rest[open + 1..close].split_once(':').unwrap_or((&rest[open + 1..close], ""));
        out.push_str(&rest[..open]);
        match (value(name)?, format) {
            (TemplateValue::Text(text), "") => out.push_str(text),
            (TemplateValue::Text(_), _) => return None,
            (TemplateValue::Number(number), "") => out.push_str(&number.to_string()),
            (TemplateValue::Number(number), format) => {
                let width = match format.strip_suffix('d')? {
                    "" => 0,
                    digits => digits.strip_prefix('0')?.parse::<usize>().ok().filter(|w| *w <= 20)?,
                };
                out.push_str(&format!("{number:0width$}"));
            }
        }
        rest = &rest[close + 1..];
    }
    out.push_str(rest);
    Some(out)
}

/// Whether a path leads out of the directory that it is relative to. Symbolic links in it may: the cache of
/// Hugging Face's hub is made of them.
pub(super) fn leaves(template: &str) -> bool {
    let parts = || Path::new(template).components();
    parts().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_expand_as_python_formats_them() {
        let fill = |name: &str| match name {
            "chunk_index" => Some(TemplateValue::Number(2)),
            "file_index" => Some(TemplateValue::Number(1234567)),
            "video_key" => Some(TemplateValue::Text("observation.images.top")),
            _ => None,
        };
        let path = expand("data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", fill);
        assert_eq!(path.as_deref(), Some("data/chunk-002/file-1234567.parquet"));
        assert_eq!(expand("{chunk_index}/{file_index:09d}", fill).as_deref(), Some("2/001234567"));
        let video = expand("videos/{video_key}/chunk-{chunk_index:03d}.mp4", fill);
        assert_eq!(video.as_deref(), Some("videos/observation.images.top/chunk-002.mp4"));
        for bad in
            ["{unknown}", "{video_key:03d}", "{chunk_index:x}", "{chunk_index", "{chunk_index:0999999999d}"]
        {
            assert_eq!(expand(bad, fill), None, "{bad}");
        }
    }
}
