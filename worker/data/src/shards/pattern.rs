//! Which files a pattern names: `shards-{0000..0012}.tar`, `{train,extra}-*.tar`.

use std::path::{Path, PathBuf};

use crate::DataError;

/// Files of one data set.
const MOST: usize = 65_536;

/// Endings of tar files that were compressed as a whole.
const COMPRESSED: [&str; 6] = [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar.lz4"];

/// Whether a path or pattern names tar files, readable or not.
pub fn names_shards(path: &Path) -> bool {
    let text = path.to_string_lossy().to_lowercase();
    text.ends_with(".tar") || is_compressed(&text)
}

fn is_compressed(path: &str) -> bool {
    COMPRESSED.iter().any(|ending| path.ends_with(ending))
}

/// The files that a pattern names: braces in their order, and what a `*`, `?` or `[..]` matches by name. A
/// file whose own name is the pattern is meant as it is.
pub fn expand(pattern: &Path) -> Result<Vec<PathBuf>, DataError> {
    let refuse = |found: String, remedy: &str| DataError::invalid(pattern, "data.path", found, remedy);
    if pattern.is_file() {
        return readable(vec![pattern.to_path_buf()]);
    }
    let text = pattern.to_str().ok_or_else(|| refuse("is not UTF-8".into(), "rename the files"))?;
    let mut files: Vec<PathBuf> = Vec::new();
    for one in braces(text).map_err(|found| refuse(found, "write {0000..0012} or {train,extra}"))? {
        if !one.contains(['*', '?', '[']) {
            files.push(one.into());
            continue;
        }
        let matches = glob::glob(&one).map_err(|error| {
            refuse(format!("`{one}` is not a valid pattern ({error})"), "write it with *, ? or [0-9]")
        })?;
        let before = files.len();
        for path in matches {
            files.push(path.map_err(|error| {
                let path = error.path().to_owned();
                DataError::io(&path, "list")(error.into())
            })?);
        }
        if files.len() == before {
            return Err(refuse(
                format!("`{one}` matches no file"),
                "correct it; relative paths start from the directory in which `cox` runs",
            ));
        }
    }
    if files.len() > MOST {
        let found = format!("names {} files, more than {MOST}", files.len());
        return Err(refuse(found, "write fewer and larger shards"));
    }
    let mut sorted: Vec<&PathBuf> = files.iter().collect();
    sorted.sort();
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(refuse(format!("names {} twice", twice[0].display()), "name each shard once"));
    }
    readable(files)
}

fn readable(files: Vec<PathBuf>) -> Result<Vec<PathBuf>, DataError> {
    let packed = files.iter().find(|file| is_compressed(&file.to_string_lossy().to_lowercase()));
    match packed {
        Some(file) => {
            let found = "is compressed as a whole, so single samples cannot be read";
            let remedy = "unpack it to a .tar; images and audio in it are compressed anyway";
            Err(DataError::invalid(file, "(file)", found, remedy))
        }
        None => Ok(files),
    }
}

/// A text for every choice of its braces, the first pair varying slowest; or what is wrong with them.
fn braces(text: &str) -> Result<Vec<String>, String> {
    let Some((before, rest)) = text.split_once('{') else {
        return match text.contains('}') {
            true => Err("closes a brace that was not opened".into()),
            false => Ok(vec![text.to_owned()]),
        };
    };
    let (inside, after) = rest.split_once('}').ok_or("opens a brace and does not close it")?;
    if before.contains('}') || inside.contains('{') {
        return Err("has nested or crossed braces".into());
    }
    let choices = match inside.split_once("..") {
        Some((first, last)) => numbers(first, last)?,
        None => inside.split(',').map(str::to_owned).collect(),
    };
    let rests = braces(after)?;
    if choices.len().saturating_mul(rests.len()) > MOST {
        return Err(format!("names more than {MOST} files"));
    }
    Ok(choices
        .iter()
        .flat_map(|choice| rests.iter().map(move |rest| format!("{before}{choice}{rest}")))
        .collect())
}

/// `first..last`, with as many digits as the longer has where one begins with 0, as a shell counts.
fn numbers(first: &str, last: &str) -> Result<Vec<String>, String> {
    let number =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok());
    let (Some(Some(from)), Some(Some(to))) = (number(first), number(last)) else {
        return Err(format!("has {{{first}..{last}}}, which is not a range of two numbers"));
    };
    if from > to || to - from >= MOST as u64 {
        return Err(format!(
            "has {{{first}..{last}}}, which counts backwards or names more than {MOST} files"
        ));
    }
    let padded = [first, last].iter().any(|text| text.len() > 1 && text.starts_with('0'));
    let width = if padded { first.len().max(last.len()) } else { 0 };
    Ok((from..=to).map(|number| format!("{number:0width$}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_count_as_a_shell_does() {
        assert_eq!(
            braces("a-{08..11}.tar"),
            Ok(["08", "09", "10", "11"].map(|n| format!("a-{n}.tar")).into())
        );
        assert_eq!(braces("{8..10}"), Ok(["8", "9", "10"].map(String::from).into()));
        assert_eq!(braces("{a,b}-{0..1}"), Ok(["a-0", "a-1", "b-0", "b-1"].map(String::from).into()));
        assert_eq!(braces("plain.tar"), Ok(vec!["plain.tar".into()]));
        for wrong in ["{0..", "0}", "{a{b}}", "{3..1}", "{x..3}", "{0..99999999}", "{0..999}{0..999}", "{..}"]
        {
            assert!(braces(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_those_that_are_there_in_order_of_braces_and_names() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["b-1.tar", "a-1.tar", "a-0.tar", "odd{1.tar", "c.tar.gz"] {
            std::fs::write(dir.path().join(name), "").expect("a file");
        }
        let of = |pattern: &str| {
            let files = expand(&dir.path().join(pattern)).map_err(|error| error.to_string())?;
            Ok(files
                .iter()
                .filter_map(|file| Some(file.file_name()?.to_str()?.to_owned()))
                .collect::<Vec<_>>())
        };
        let named = |names: &[&str]| Ok::<_, String>(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(of("a-*.tar"), named(&["a-0.tar", "a-1.tar"]));
        assert_eq!(of("{b,a}-1.tar"), named(&["b-1.tar", "a-1.tar"]));
        assert_eq!(of("odd{1.tar"), named(&["odd{1.tar"]));
        for (pattern, wanted) in [
            ("z-*.tar", "matches no file; correct it"),
            ("a-{0..1.tar", "opens a brace"),
            ("a-{0,0}.tar", "twice; name each shard once"),
            ("*.tar.gz", "compressed as a whole"),
        ] {
            let found: Result<Vec<String>, String> = of(pattern);
            let found = found.expect_err(pattern);
            assert!(found.contains(wanted), "{pattern}: {found}");
        }
        assert!(names_shards(Path::new("s-{0..3}.TAR")) && names_shards(Path::new("a.tgz")));
        assert!(!names_shards(Path::new("chats.jsonl")) && !names_shards(Path::new("tar")));
    }
}
