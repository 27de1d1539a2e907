//! The C header matches the exported functions.

use std::path::Path;

#[test]
fn the_committed_header_is_the_one_that_the_sources_make() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).expect("cbindgen.toml");
    let mut builder = cbindgen::Builder::new().with_config(config);
    // The modules of `capi` are found there.
    for source in ["src/guard.rs", "src/capi/mod.rs"] {
        builder = builder.with_src(here.join(source));
    }
    let mut made = Vec::new();
    builder.generate().expect("sources that cbindgen reads").write(&mut made);
    let made = String::from_utf8(made).expect("text");
    let header = here.join("include/symmpool.h");
    if std::env::var_os("SYMMPOOL_BLESS").is_some() {
        std::fs::write(&header, &made).expect("writing the header");
    }
    let committed = std::fs::read_to_string(&header).unwrap_or_default();
    assert!(
        committed == made,
        "ffi/include/symmpool.h is out of date; \
         SYMMPOOL_BLESS=1 cargo test -p symmpool-ffi --test header writes it anew"
    );
    assert!(made.matches("\n// ").count() > 100, "every function is documented");
    let code = made.lines().filter(|line| !line.starts_with("//"));
    let mut functions: Vec<&str> =
        code.filter_map(|line| line.split_once('(')).map(|it| it.0).collect();
    let all = functions.len();
    functions.sort_unstable();
    functions.dedup();
    assert!(functions.len() == all && all > 30, "every function is declared once");
}
