//! Puts an object and gets it back: `hello <master address>`.

use mooncake_base::ObjectKey;
use mooncake_store_client::Store;

fn main() -> mooncake_base::Result<()> {
    let master = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let store = Store::connect(&master)?;
    let key = ObjectKey::new(*b"greeting")?;
    store.put(&key, b"Hello, Mooncake!")?;
    assert_eq!(store.get(&key)?.as_deref(), Some(&b"Hello, Mooncake!"[..]));
    store.close();
    Ok(())
}
