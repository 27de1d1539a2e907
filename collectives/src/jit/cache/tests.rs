//! Damage, distrust, and many processes at once.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Child, Stdio};

use symmpool_allocator::testing::{role, this_test_as};
use tempfile::TempDir;

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn key() -> Key {
    Key::of([b"kernel".as_slice(), b"options"])
}

fn entry() -> CachedKernel {
    CachedKernel { kind: 1, bytes: (0..200).collect() }
}

fn cache() -> (TempDir, Cache) {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::open(&folder.path().join("made/here"), LONG).expect("a cache");
    (folder, cache)
}

fn made(cache: &Cache) -> bool {
    let mut made = false;
    let got = cache.get_or_make(key(), || {
        made = true;
        Ok::<_, ()>(entry())
    });
    assert_eq!(got, Ok(entry()));
    made
}

fn path(cache: &Cache) -> PathBuf {
    cache.path.join(file_name(key()))
}

#[test]
fn keys_tell_parts_from_their_concatenation() {
    let keys = [
        Key::of([b"ab".as_slice(), b"c"]),
        Key::of([b"a".as_slice(), b"bc"]),
        Key::of([b"abc".as_slice()]),
        Key::of([b"abc".as_slice(), b""]),
        Key::of([b"c".as_slice(), b"ab"]),
    ];
    for (i, one) in keys.iter().enumerate() {
        assert!(keys[i + 1..].iter().all(|other| one != other));
    }
}

#[test]
fn an_image_is_made_once_and_nothing_else_is_left() {
    let (_folder, cache) = cache();
    assert!(made(&cache));
    assert!(!made(&cache));
    let again = Cache::open(&cache.path, LONG).expect("the same cache");
    assert!(!made(&again));
    let files: Vec<_> = fs::read_dir(&cache.path).expect("a folder").flatten().collect();
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(files[0].path(), path(&cache));
}

#[test]
fn a_failure_is_not_kept() {
    let (_folder, cache) = cache();
    assert_eq!(cache.get_or_make(key(), || Err("no")), Err("no"));
    assert!(made(&cache));
}

#[test]
fn every_cut_and_every_changed_byte_is_noticed_and_mended() {
    let (_folder, cache) = cache();
    made(&cache);
    let whole = fs::read(path(&cache)).expect("a file");
    let cuts = (0..whole.len()).map(|length| whole[..length].to_vec());
    let flips = (0..whole.len()).map(|at| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        bytes
    });
    let longer = [&whole[..], b"x"].concat();
    for damaged in cuts.chain(flips).chain([longer]) {
        assert!(decode(key(), &damaged).is_err());
    }
    fs::write(path(&cache), &whole[..whole.len() / 2]).expect("written");
    assert!(made(&cache));
    assert_eq!(fs::read(path(&cache)).expect("a file"), whole);
}

#[test]
fn the_image_of_another_key_is_not_taken() {
    let (_folder, cache) = cache();
    let other = Key::of([b"other".as_slice()]);
    fs::write(path(&cache), encode(other, &entry())).expect("written");
    assert!(made(&cache));
}

#[test]
fn what_others_could_have_written_is_not_trusted() {
    let (_folder, cache) = cache();
    made(&cache);
    // Another user finds the files to be somebody else's.
    let theirs = Cache { owner: cache.owner + 1, ..Cache::open(&cache.path, LONG).expect("") };
    assert!(theirs.load(key()).is_none());
    assert!(Cache::open_as(&cache.path, LONG, cache.owner + 1).is_err());

    fs::set_permissions(path(&cache), PermissionsExt::from_mode(0o620)).expect("set");
    assert!(cache.load(key()).is_none());
    assert!(made(&cache) && !made(&cache));

    let moved = cache.path.join("moved");
    fs::rename(path(&cache), &moved).expect("renamed");
    symlink(&moved, path(&cache)).expect("a link");
    assert!(cache.load(key()).is_none());
    assert!(made(&cache) && !made(&cache));

    let link = cache.path.with_file_name("link");
    symlink(&cache.path, &link).expect("a link");
    assert!(Cache::open(&link, LONG).is_err());

    fs::set_permissions(&cache.path, PermissionsExt::from_mode(0o777)).expect("set");
    let why = Cache::open(&cache.path, LONG).err().expect("refused");
    assert!(why.contains("777"), "{why}");
}

#[test]
fn a_folder_that_cannot_be_is_refused_and_one_that_vanished_does_no_harm() {
    let (folder, cache) = cache();
    let file = folder.path().join("file");
    fs::write(&file, "").expect("written");
    assert!(Cache::open(&file.join("below"), LONG).is_err());
    assert!(Cache::open(&file, LONG).is_err());
    fs::remove_dir_all(&cache.path).expect("removed");
    assert!(made(&cache) && made(&cache));
}

#[test]
fn an_image_that_cannot_be_put_in_its_place_leaves_nothing_behind() {
    let (_folder, cache) = cache();
    fs::create_dir(path(&cache)).expect("a folder where the image goes");
    assert!(made(&cache) && made(&cache));
    let left = fs::read_dir(&cache.path).expect("a folder").map(|entry| entry.unwrap().path());
    assert_eq!(left.collect::<Vec<_>>(), [path(&cache)]);
}

#[test]
fn the_wait_for_another_compiler_ends() {
    let (_folder, cache) = cache();
    let short = Cache::open(&cache.path, Duration::from_millis(30)).expect("a cache");
    let held = cache.lock(key());
    assert!(matches!(held, Turn::Mine(_)));
    assert!(made(&short));
    drop(held);
}

#[test]
fn threads_make_an_image_once() {
    let (_folder, cache) = cache();
    let count = std::sync::atomic::AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let got = cache.get_or_make(key(), || {
                    count.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(30));
                    Ok::<_, ()>(entry())
                });
                assert_eq!(got, Ok(entry()));
            });
        }
    });
    assert_eq!(count.into_inner(), 1);
}

/// Work of the processes of the tests below; nothing when run as a test.
#[test]
fn a_process_of_another_test() {
    let Some(folder) = role().map(PathBuf::from) else { return };
    let cache = Cache::open(&folder.join("cache"), LONG).expect("a cache");
    if folder.join("hang").exists() {
        let _held = cache.lock(key());
        fs::write(folder.join("held"), "").expect("written");
        thread::sleep(LONG);
    }
    let got = cache.get_or_make(key(), || {
        let count = fs::OpenOptions::new().create(true).append(true).open(folder.join("count"));
        count.and_then(|mut count| count.write_all(b".")).expect("counted");
        thread::sleep(Duration::from_millis(200));
        Ok::<_, ()>(entry())
    });
    assert_eq!(got, Ok(entry()));
}

fn start(folder: &Path) -> Child {
    let folder = folder.to_str().expect("a folder of this test");
    this_test_as("jit::cache::tests::a_process_of_another_test", folder)
        .stdout(Stdio::null())
        .spawn()
        .expect("a process")
}

#[test]
fn of_many_processes_one_compiles() {
    let folder = tempfile::tempdir().expect("a folder");
    let all: Vec<_> = (0..6).map(|_| start(folder.path())).collect();
    for mut one in all {
        assert!(one.wait().expect("an end").success());
    }
    assert_eq!(fs::read(folder.path().join("count")).expect("a count"), b".");
}

#[test]
fn a_compiler_that_dies_is_replaced_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let (hang, held) = (folder.path().join("hang"), folder.path().join("held"));
    fs::write(&hang, "").expect("written");
    let mut first = start(folder.path());
    let until = Instant::now() + LONG;
    while !held.exists() {
        assert!(Instant::now() < until, "the process never took the lock");
        thread::sleep(Duration::from_millis(5));
    }
    fs::remove_file(&hang).expect("removed");
    let mut second = start(folder.path());
    thread::sleep(Duration::from_millis(100));
    assert!(second.try_wait().expect("a state").is_none(), "it did not wait for the first");
    first.kill().expect("killed");
    first.wait().expect("an end");
    let before = Instant::now();
    assert!(second.wait().expect("an end").success());
    assert!(before.elapsed() < LONG / 2);
    assert_eq!(fs::read(folder.path().join("count")).expect("a count"), b".");
}

/// Has a file look as if it had last been used so many days ago.
fn age(path: &Path, days: u64) {
    let then = std::time::SystemTime::now() - Duration::from_secs(days * 24 * 3600);
    File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
}

#[test]
fn what_was_not_used_for_longest_is_removed_first() {
    let (_folder, cache) = cache();
    let keys: Vec<_> = (0..8u8).map(|nth| Key::of([[nth].as_slice()])).collect();
    let file = |key: &Key| cache.path.join(file_name(*key));
    for (key, days) in keys.iter().zip([8, 7, 6, 5, 4, 3, 2, 9]) {
        cache.store(*key, &entry()).unwrap();
        age(&file(key), days);
    }
    let bytes = fs::metadata(file(&keys[0])).unwrap().len();
    let others = ["x.kernel.0123456789abcdef", "y.kernel.0123456789abcdef", "notes.txt"];
    for name in others {
        fs::write(cache.path.join(name), "unfinished").unwrap();
    }
    age(&cache.path.join(others[0]), 2);
    age(&cache.path.join(others[2]), 2);
    // The last one is used again, so it is not the oldest any more.
    assert!(cache.load(keys[7]).is_some());
    cache.trim(8 * bytes).unwrap();
    assert!(keys.iter().all(|key| file(key).exists()), "all fit");
    assert_eq!(others.map(|name| cache.path.join(name).exists()), [false, true, true]);
    cache.trim(8 * bytes - 1).unwrap();
    let left = keys.iter().map(|key| file(key).exists()).collect::<Vec<_>>();
    assert_eq!(left, [false, false, false, true, true, true, true, true]);
    assert!(cache.load(keys[0]).is_none() && cache.load(keys[7]).is_some());
}
