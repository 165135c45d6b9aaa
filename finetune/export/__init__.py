"""What was learned in forms that other tools load: a merged model, a PEFT adapter."""
