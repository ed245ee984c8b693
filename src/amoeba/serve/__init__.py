"""An HTTP server that speaks OpenAI's protocol: `amoeba serve`. Needs the extra [serve], which nothing else imports."""
