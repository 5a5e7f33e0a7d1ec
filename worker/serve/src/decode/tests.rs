//! Messages as clients write them, and messages that are none.

use super::*;
use crate::encode::{Message, encode, encode_flat};

fn named(entries: &[(&str, Value)]) -> NamedValues {
    entries.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}

fn array_of(dtype: &str, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let mut out = Message::default();
    out.map(1);
    out.text("x");
    out.array(dtype, shape, data);
    out.0
}

#[test]
fn what_is_written_is_read_again() {
    let values = named(&[
        ("prompt", Value::Text("open the drawer".into())),
        ("seed", Value::Integer(-7)),
        ("camera", Value::bytes(vec![1, 2, 3], vec![0, 1, 2, 3, 4, 255])),
        ("state", Value::numbers(vec![2], vec![0.5, -1.5])),
    ]);
    assert_eq!(decode(&encode_flat(&values)).unwrap(), values);
    let answer = encode(&values, &[("infer_ms", 1.5)]);
    assert_eq!(decode_answer(&answer), values);
}

#[test]
fn numbers_of_every_type_become_float32_and_say_which_they_were() {
    let cases: [(&str, &str, Vec<u8>); 9] = [
        ("|i1", "int8", vec![0xfe]),
        ("<i2", "int16", (-2i16).to_le_bytes().to_vec()),
        ("<i4", "int32", (-2i32).to_le_bytes().to_vec()),
        ("<i8", "int64", (-2i64).to_le_bytes().to_vec()),
        ("<f4", "float32", (-2f32).to_le_bytes().to_vec()),
        ("<f8", "float64", (-2f64).to_le_bytes().to_vec()),
        ("<u2", "uint16", 2u16.to_le_bytes().to_vec()),
        ("<u4", "uint32", 2u32.to_le_bytes().to_vec()),
        ("<u8", "uint64", 2u64.to_le_bytes().to_vec()),
    ];
    for (dtype, name, data) in cases {
        let wanted = if dtype.contains('u') { 2.0 } else { -2.0 };
        let found = decode(&array_of(dtype, &[1, 1], &data)).unwrap();
        let expected = Value::Numbers(Array { shape: vec![1, 1], values: vec![wanted], dtype: name });
        assert_eq!(found["x"], expected, "{dtype}");
    }
}

#[test]
fn a_whole_number_of_numpy_is_one() {
    let message = b"\x81\xa4seed\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x07\xc4\x05dtype\xa3<i8";
    assert_eq!(decode(message).unwrap()["seed"], Value::Integer(7));
}

#[test]
fn a_python_list_of_numbers_is_an_array() {
    let message = b"\x81\xa1x\x93\x01\xcb\x3f\xe0\0\0\0\0\0\0\xff";
    let expected = Value::Numbers(Array { shape: vec![3], values: vec![1.0, 0.5, -1.0], dtype: "numbers" });
    assert_eq!(decode(message).unwrap()["x"], expected);
}

#[test]
fn an_array_of_another_packer_is_named_with_the_one_that_reads_answers() {
    // msgpack_numpy.packb({"x": np.float32([1])}).
    let message = b"\x81\xa1x\x85\xc4\x02nd\xc3\xc4\x04type\xa3<f4\xc4\x04kind\xc4\0\xc4\x05shape\x91\x01\
                    \xc4\x04data\xc4\x04\0\0\x80\x3f";
    let told = decode(message).unwrap_err().to_string();
    assert!(told.starts_with("x: ") && told.contains("openpi_client.msgpack_numpy"), "{told}");
}

#[test]
fn maps_within_the_map_are_taken_apart() {
    let message = b"\x82\xa6images\x82\xa1a\x01\xa1b\x81\xa1c\x02\xa5state\x03";
    let wanted = [("images/a", 1), ("images/b/c", 2), ("state", 3)];
    assert_eq!(decode(message).unwrap(), named(&wanted.map(|(name, value)| (name, Value::Integer(value)))));
    assert_eq!(decode(b"\x81\xa1x\x80"), Ok(NamedValues::new()));
}

#[test]
fn arrays_that_are_not_what_they_say_are_refused_by_name() {
    for (message, wanted) in [
        (array_of("|O", &[1], &[0; 8]), "dtype |O"),
        (array_of("<f2", &[1], &[0; 2]), "dtype <f2"),
        (array_of("<f4", &[2], &[0; 4]), "4 bytes are no array of shape [2]"),
        (array_of("<f8", &[usize::MAX / 2, 9], &[0; 8]), "8 bytes"),
        (b"\x81\xa1x\x81\xc4\x0b__ndarray__\xc3".to_vec(), "needs data, dtype and shape"),
        (b"\x81\xa1x\x81\xc4\x0d__npgeneric__\xc3".to_vec(), "not a number"),
        (b"\x81\xa1x\x81\xa1y\x81\xa1z\x81\xa1a\x01".to_vec(), "nested deeper"),
        (b"\x81\xa1x\xc4\x01a".to_vec(), "bytes; send"),
        (b"\x81\xa1x\x91\xa1a".to_vec(), "a list with text"),
    ] {
        let refused = decode(&message).unwrap_err().to_string();
        assert!(refused.starts_with('x') && refused.contains(wanted), "{refused}");
    }
}

#[test]
fn what_is_no_map_of_named_values_is_refused() {
    let deep = [b"\x81\xa1x".as_slice(), &[0x91; 40], b"\x01"].concat();
    let many = [b"\x81\xa1x\xde\x01\x01".as_slice(), &b"\xa1y\x01".repeat(257)].concat();
    let long = [b"\x81\xda\x01\x01".as_slice(), &[b'x'; 257], b"\x01"].concat();
    for (message, wanted) in [
        (&b""[..], WireError::Truncated),
        (b"\x81", WireError::Truncated),
        (b"\x81\xa1x\xdd\x00\x00\xff\xff", WireError::Truncated),
        (b"\xdf\xff\xff\xff\xff", WireError::Entries(u32::MAX)),
        (b"\xc1", WireError::Garbled(0xc1)),
        (b"\x81\xa1\xff\x01", WireError::Text),
        (b"\x80\x01", WireError::Trailing(1)),
        (b"\x93\x01\x02\x03", WireError::NoMap("a list")),
        (b"\x81\x01\x02", WireError::NoMap("a whole number")),
        (&deep, WireError::Deep),
        (&many, WireError::Entries(257)),
        (&long, WireError::Name(257)),
    ] {
        assert_eq!(decode(message), Err(wanted), "{message:?}");
    }
}

#[test]
fn no_prefix_of_a_message_is_one_and_no_flipped_byte_ends_the_process() {
    let whole = array_of("<f4", &[2, 2], &[1; 16]);
    (0..whole.len()).for_each(|end| assert!(decode(&whole[..end]).is_err(), "{end}"));
    for at in 0..whole.len() {
        for byte in 0..=255 {
            let mut message = whole.clone();
            message[at] = byte;
            // Whatever it says of it, it comes back.
            let _ = decode(&message);
        }
    }
}

#[test]
fn hostile_observations_are_refused_or_read_within_their_own_size() {
    let observation = named(&[
        ("prompt", Value::Text("open the drawer".into())),
        ("seed", Value::Integer(-7)),
        ("camera", Value::bytes(vec![4, 4, 3], (0..48).collect())),
        ("state", Value::numbers(vec![3], vec![0.5, -1.5, 2.0])),
    ]);
    let samples = [
        encode_flat(&observation),
        encode(&observation, &[("infer_ms", 1.5)]),
        array_of("<f8", &[1, 2], &[7; 16]),
    ];
    coxswain_fuzz::Target::new("observations", samples).tries(20_000).holds(64 << 10, 32).check(|bytes| {
        drop(decode(bytes));
    });
}
